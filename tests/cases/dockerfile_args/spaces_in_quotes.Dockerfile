ARG A="7.5 8.0" B='9 10'
FROM scratch
