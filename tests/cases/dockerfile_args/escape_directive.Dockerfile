# escape=`
ARG A=1 `
  B=C:\x\y
FROM scratch
