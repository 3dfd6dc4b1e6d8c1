ARG A=
ARG B=""
FROM scratch
