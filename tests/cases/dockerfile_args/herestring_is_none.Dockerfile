FROM scratch AS s
RUN cat <<<EOF
ARG YES=1
