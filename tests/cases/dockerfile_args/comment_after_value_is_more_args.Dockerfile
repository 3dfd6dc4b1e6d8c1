ARG V=1.2 # no comment
FROM scratch
