FROM scratch AS a
ARG V=1
FROM a AS b
ARG W=${V}.2
