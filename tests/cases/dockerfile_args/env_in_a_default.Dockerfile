FROM scratch AS a
ENV V=1
ARG W=${V}x
