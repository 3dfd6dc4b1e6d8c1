FROM scratch AS s
ARG V=1 \