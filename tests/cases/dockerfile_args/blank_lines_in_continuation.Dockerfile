ARG A=1 \

  
  B=2
FROM scratch
