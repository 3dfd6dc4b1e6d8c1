FROM scratch AS s
RUN echo "<<EOF"
ARG YES=1
