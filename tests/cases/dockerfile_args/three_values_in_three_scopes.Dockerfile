ARG V=1
FROM scratch AS a
ARG V=2
FROM scratch AS b
ARG V=3
