FROM scratch AS a
ENV V=1
ARG V=2
FROM a AS b
ARG W=$V
