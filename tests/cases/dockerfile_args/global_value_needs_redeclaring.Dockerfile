ARG V=1
FROM scratch AS a
ARG W=x${V}
