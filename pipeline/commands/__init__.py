"""The commands of `pipeline`, one module each, imported only when asked for.

A command module has two functions: `configure(parser)` adds its arguments, `execute(arguments)` does the work
and returns an exit code. Nothing is imported at module level that costs time which another command need not pay.
"""

from __future__ import annotations

# name -> (module below pipeline.commands, one line for `pipeline --help`)
COMMANDS: dict[str, tuple[str, str]] = {
    "image": ("image", "build a tuned image of a model, end to end"),
    "plan": ("plan", "say what would be tuned for a model"),
    "tune": ("tune", "fill the host's store with a tuned cache, without building the image"),
    "retune": ("retune", "tune a tuned image again, and replace only its cache layer"),
    "graft": ("graft", "add a tuned cache to an image without building it"),
    "verify": ("verify", "check a finished image: nothing is tuned again"),
    "release": ("release", "push verified images of a matrix to a registry, with what proves them"),
    "explain": ("explain", "say whether a cache would be used here, and if not, why"),
    "cache": ("cache", "list, compare, merge, export and prune tuned caches"),
    "attest": ("attest", "check what proves an image in a registry: signature, provenance, SBOM, verdict"),
    "sync": ("sync", "render docker/ and requirements/ from versions.json"),
    "check": ("check", "prove that every version agrees with versions.json"),
    "bump": ("bump", "move a version, and everything that is tied to it"),
    "where": ("where", "list every place that a version reaches"),
    "audit": ("audit", "find versions that disagree in a repository that is not built this way"),
    "args": ("args", "print the ARGs of Dockerfiles as BuildKit reads them"),
    "pins": ("pins", "print the requirements of requirements files"),
    "daemon": ("daemon", "find, start, stop or remove a Docker Engine"),
}
