FROM scratch AS s
COPY <<A <<-B /x/
ARG NO=1
A
ARG NO=2
	B
ARG YES=1
