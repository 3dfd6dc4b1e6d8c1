# Rendered from templates/docker-bake.hcl.j2 and versions.json by `pipeline versions sync`; edit those.
#
#   docker buildx bake -f docker/docker-bake.hcl -f versions.json [--print] [TARGET]
#
# versions.json comes last and so gives the values; the defaults here are the same ones. The environment overrides
# both: TORCH_VERSION=2.14.0 docker buildx bake ...

variable "BASE_IMAGE" {
  default = "python:3.11.14-slim-bookworm"
}

variable "FLASHINFER_VERSION" {
  default = "0.6.16.post3"
}

variable "TORCH_VERSION" {
  default = "2.13.0"
}

group "default" {
  targets = ["runtime"]
}

target "_versions" {
  context    = "."
  dockerfile = "docker/Dockerfile"
  network    = "none"
  args = {
    BASE_IMAGE         = BASE_IMAGE
    FLASHINFER_VERSION = FLASHINFER_VERSION
    TORCH_VERSION      = TORCH_VERSION
  }
}

target "runtime" {
  inherits = ["_versions"]
  target   = "runtime"
}

target "tuner" {
  inherits = ["_versions"]
  target   = "tuner"
}

target "tuned" {
  inherits = ["_versions"]
  target   = "tuned"
}

target "final" {
  inherits = ["_versions"]
  target   = "final"
}
