ARG A=1
ARG V=\${A}
FROM scratch
