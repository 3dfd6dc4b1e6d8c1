ARG V=1
FROM scratch AS a
ARG V
ARG W=${V}.5
