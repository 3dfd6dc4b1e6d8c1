FROM scratch
ARG V=1
FROM scratch
ARG V=2
