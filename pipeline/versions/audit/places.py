"""One value of one name at one place, and what names have in common."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from pipeline.versions.relations import canonical
from pipeline.versions.sites import local_label

# Words in a path or a local label that mark a variant, for which another version may well be meant. What says `cuda`
# is what says nothing: the variant that most builds are.
_VARIANTS = frozenset({
    "cpu", "rocm", "rock", "hip", "amd", "xpu", "intel", "hpu", "gaudi", "tpu", "npu", "ascend", "musa", "neuron",
    "metal", "mps", "arm", "arm64", "aarch64", "s390x", "ppc64le", "riscv64", "x86", "windows", "macos", "darwin",
    "alpine", "ubi", "rhel", "jetson", "gb200", "gh200", "zen", "nightly", "prerelease", "rubin", "lowest", "oldest",
    "legacy", "docs", "doc", "lint", "benchmark", "benchmarks", "example", "examples", "recipes", "samples",
})  # fmt: skip
CUDA_LABEL = re.compile(r"cu\d+")
_FAMILY = ("-python", "-cubin", "-jit-cache")
_PREFIXES = ("nightly-", "default-", "pinned-", "expected-", "target-")


@dataclass(frozen=True, order=True)
class Place:
    """A name with a value.

    `kind` is one of ARG, ENV, bake, build-arg, pin, range, image, git, yaml, shell, python. `name` is spelled as there,
    `stem` is what names of one thing share, `scope` the Dockerfile stage or the marker that limits it.
    """

    path: str
    line: int
    kind: str
    name: str
    value: str
    stem: str
    scope: str = ""

    @property
    def variants(self) -> frozenset[str]:
        """Words of the path, the scope and the local label that say for which variant this is.

        A label of CUDA is none: CUDA is what most builds are for, and a plain version may well mean it.
        """
        label = local_label(self.value)
        return _variants(f"{self.path} {self.scope} {'' if CUDA_LABEL.fullmatch(label) else label}")

    @property
    def folder(self) -> str:
        """The folder of the file."""
        return self.path.rpartition("/")[0]


@lru_cache(maxsize=65536)
def _variants(text: str) -> frozenset[str]:
    words = re.split(r"[^a-z0-9]+", text.lower())
    bare = {re.sub(r"^(rocm|cu)\d.*", r"\1", word) if not word.startswith("cu") else word for word in words}
    return frozenset(bare & _VARIANTS) | frozenset(word for word in bare if re.fullmatch(r"(?:cu|gfx|sm)\d+\w*", word))


def variable_stem(name: str) -> str:
    """`NIGHTLY_CUDA_VERSION` and `cuda_version` are about `cuda`; a name that is no version stands for itself."""
    low = name.lower().replace("_", "-")
    if low.endswith("-version"):
        stem = low[: -len("-version")]
        for prefix in _PREFIXES:
            stem = stem.removeprefix(prefix)
        return stem
    return f"={low}"


def is_family(name: str) -> bool:
    """Whether a package is one of several that are released together."""
    return canonical(name).endswith(_FAMILY)


def package_stem(name: str) -> str:
    """`flashinfer-python`, `flashinfer-cubin` and `FLASHINFER_VERSION` are about `flashinfer`."""
    stem = canonical(name)
    for suffix in _FAMILY:
        stem = stem.removesuffix(suffix)
    return stem


def image_stem(repository: str) -> str:
    """`nvidia/cuda` is about `cuda`."""
    return repository.rpartition("/")[2].lower()


def is_version(text: str) -> bool:
    """Whether a text could be a version at all: digits and dots first."""
    return bool(re.fullmatch(r"v?\d+(?:\.\d+)*(?:[-.+_]?[A-Za-z0-9]+)*", text)) and len(text) < 60
