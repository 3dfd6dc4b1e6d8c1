ARG CUDA=13
ARG X=${CUDA:+yes}
ARG Y=${NONE:+yes}
FROM scratch
