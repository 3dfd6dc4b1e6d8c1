ARG V=13.0.3
ARG ONE=${V/./-}
ARG ALL=${V//./-}
FROM scratch
