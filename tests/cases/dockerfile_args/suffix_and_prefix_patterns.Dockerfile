ARG V=13.0.3
ARG MAJOR=${V%%.*}
ARG MINOR=${V%.*}
ARG REST=${V#*.}
ARG LAST=${V##*.}
FROM scratch
