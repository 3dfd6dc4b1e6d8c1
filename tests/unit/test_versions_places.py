"""Versions in commands and settings: what each is about, and what only looks like one."""

from __future__ import annotations

from pathlib import Path

import pytest
from versions_trees import CUDA, FLASHINFER, plant, source, texts

from pipeline.versions.check import check

VALUES = {"FLASHINFER_VERSION": "0.6.16.post3", "CUDA_VERSION": "13.0.3", "TORCH_VERSION": "2.13.0"}


def findings(root: Path, files: dict[str, str | bytes]) -> list[str]:
    relations = {"FLASHINFER_VERSION": FLASHINFER, "CUDA_VERSION": CUDA}
    plant(root, {"versions.json": source(VALUES, relations), **files})
    return [line for line in texts(check(root).findings) if "reaches no ARG" not in line]


DEVEL = "https://example.invalid/o"


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        (
            "docker/b.sh",
            f"git clone {DEVEL}/flashinfer -b v0.6.15 && git clone {DEVEL}/other\n",
            [":1: flashinfer at v0.6.15"],
        ),
        ("docker/b.sh", f"git clone {DEVEL}/other -b v0.6.15 && git clone {DEVEL}/flashinfer\n", []),
        (
            "docker/b.sh",
            f"git clone {DEVEL}/flashinfer\ncd flashinfer\ngit reset --hard v0.6.12\n",
            [":3: flashinfer at"],
        ),
        ("docker/b.sh", f"git clone {DEVEL}/flashinfer; cd ../other; git checkout v1.0\n", []),
        (
            "docker/b.sh",
            f'REF=v0.6.1\nexport REPO=\'{DEVEL}/flashinfer\'\n\ngit clone -b "$REF" "$REPO"\n',
            [":4: flashinfer at v0.6.1"],
        ),
        ("docker/b.sh", f"if x; then REF=v0.6.1; else REF=main; fi\ngit clone -b $REF {DEVEL}/flashinfer\n", []),
        ("Dockerfile", "FROM scratch\nENV T=2.1.0\nRUN pip install torch==$T\n", [":3: torch==2.1.0"]),
        ("Dockerfile", "FROM scratch\nRUN T=2.1.0 && pip install torch==$T\n", [":2: torch==2.1.0"]),
        (
            "Dockerfile",
            "FROM scratch AS a\nARG T=2.1.0\nFROM a\nRUN pip install torch==$T\nFROM x\nRUN pip install torch==$T\n",
            [":4: torch==2.1.0"],
        ),
        ("Dockerfile", "FROM r.invalid:5000/hub/nvidia/cuda:13.0.2-devel\n", [":1: image r.invalid:5000/hub/nvidia/"]),
        ("Dockerfile", "ARG R=r.invalid/hub\nFROM ${R}/nvidia/cuda:13.0.2-devel\n", [":2: image r.invalid/hub/nvid"]),
        ("Dockerfile", "ARG R\nFROM ${R}/nvidia/cuda:13.0.2-devel\n", [":2: image /nvidia/cuda:13.0.2-devel"]),
        ("Dockerfile", "FROM x\nCOPY --from=$R/nvidia/cuda:13.0.2-devel / /\n", [":2: image $R/nvidia/cuda:13.0.2"]),
        ("Dockerfile", "FROM r.invalid/hub/nvidia/cuda:13.0.3-devel\n", []),
        ("Dockerfile", "FROM r.invalid/my-nvidia/cuda:12.0.0\n", []),
        (
            "docker/b.sh",
            f"git clone {DEVEL}/a && git -C /src/flashinfer switch --detach v0.6.1\n",
            [":1: flashinfer at v0.6.1"],
        ),
        (
            "docker/b.sh",
            f"git clone {DEVEL}/flashinfer /x && git clone {DEVEL}/b && git -C /x checkout v0.6.1\n",
            [":1: f"],
        ),
        (
            "Dockerfile",
            f"FROM scratch\nRUN git clone {DEVEL}/flashinfer\nRUN cd flashinfer && git checkout v0.6.12\n",
            ["Dockerfile:3: flashinfer at v0.6.12"],
        ),
        (
            "Dockerfile",
            "FROM scratch\nWORKDIR /src/flashinfer\nRUN git checkout -q v0.6.12\n",
            [":3: flashinfer at v0.6.12"],
        ),
        ("Dockerfile", f"FROM scratch\nADD {DEVEL}/flashinfer.git?tag=v0.6.1 /x\n", [":2: flashinfer at v0.6.1,"]),
        (
            "Dockerfile",
            f"FROM scratch\nRUN <<EOF\ngit clone --branch \\\n v0.6.14 {DEVEL}/flashinfer.git\nEOF\n",
            [":3: flashinfer at v0.6.14"],
        ),
        ("docker/b.sh", "skopeo inspect docker://nvidia/cuda:12.6.0-devel\n", [":1: image nvidia/cuda:12.6.0-devel,"]),
        (
            "docker-bake.hcl",
            'target "a" {\n  contexts = { b = "docker-image://nvidia/cuda:12.6.0-devel" }\n}\n',
            [":2: image nvidia/cuda:12.6.0-devel,"],
        ),
        ("docker/x.py", 'FLASHINFER_VERSION: str = "0.6.16.post3"\n', []),
        ("docker/x.py", 'FLASHINFER_VERSION: str = "0.6.15"\n', [":1: FLASHINFER_VERSION=0.6.15,"]),
        ("docker/x.py", 'TORCH_VERSION = os.environ.get("TORCH_VERSION", "2.13.0")\n', []),
        (
            "docker/x.py",
            'A = os.environ.get("TORCH_VERSION", "2.12.0")\nB = getenv("TORCH_VERSION") or "2.12.1"\n',
            [":1: TORCH_VERSION=2.12.0,", ":2: TORCH_VERSION=2.12.1,"],
        ),
        ("docker/b.sh", "TORCH_VERSION=\nexport X\nprintf 'TORCH_VERSION=%s\\n'\n", []),
        ("docker/b.sh", 'sed "s/TORCH_VERSION=.*/x/"\necho "TORCH_VERSION: the version of torch"\n', []),
        ("docker/Makefile", "TORCH_VERSION ?= 2.9.7\n", [":1: TORCH_VERSION=2.9.7,"]),
        ("docker/Makefile", "CUDA_VERSION := 12.3\n", [":1: CUDA_VERSION=12.3,"]),
        ("docker/b.sh", "cmake -DTORCH_VERSION=0.5.5 .\n", [":1: TORCH_VERSION=0.5.5,"]),
        ("Dockerfile", "FROM scratch\nARG FOO_VERSION\n", ["Dockerfile:2: ARG FOO_VERSION is not managed"]),
        ("Dockerfile", "FROM scratch\nARG FOO_VERSION=\n", ["Dockerfile:2: ARG FOO_VERSION= is not managed"]),
        ("Dockerfile", "ARG FOO_VERSION=''\nFROM scratch\nARG FOO_VERSION\n", [":1: ARG FOO_VERSION= is not"]),
        ("Dockerfile", "FROM scratch\nONBUILD ARG FOO_VERSION=\n", ["Dockerfile:2: ARG FOO_VERSION= is not managed"]),
        (
            "docker-bake.hcl",
            'variable "FOO_VERSION" {\n  default = ""\n}\n',
            [":2: variable FOO_VERSION= is not managed"],
        ),
        ("Dockerfile", "FROM scratch\nONBUILD Arg TORCH_VERSION=1.8.0\n", [":2: ARG TORCH_VERSION=1.8.0,"]),
        ("Dockerfile", "FROM scratch\nONBUILD\tARG TORCH_VERSION=1.8.0\n", [":2: ARG TORCH_VERSION=1.8.0,"]),
        (
            "Dockerfile",
            "FROM scratch\nENV V=2.12\nonbuild arg TORCH_VERSION=${V}.0 X=${Y:-2.12.1}\nONBUILD ARG TORCH_VERSION=$X\n",
            [":3: ARG TORCH_VERSION=2.12.0,", ":4: ARG TORCH_VERSION=2.12.1,"],
        ),
        ("Dockerfile", 'FROM scratch\nONBUILD ARG A="1\n', []),
        ("Dockerfile", "FROM scratch\nRUN true # torch==2.9.0\n", []),
        ("Dockerfile", "FROM scratch\nRUN true # as \\\n  torch==2.9.0 it is\n", []),
        ("Dockerfile", "FROM scratch\nRUN echo '# x' && pip install torch==2.9.0\n", [":2: torch==2.9.0"]),
        ("Dockerfile", "FROM scratch\nRUN echo ${#X} a#b && pip install torch==2.9.0\n", [":2: torch==2.9.0"]),
        (
            "Dockerfile",
            "FROM scratch\nRUN <<E\ntrue # torch==2.9.0\npip install torch==2.9.1\nE\n",
            [":4: torch==2.9.1"],
        ),
        ("docker/b.sh", "true # torch==2.9.0\npip install torch==2.9.1 # not 2.9.0\n", [":2: torch==2.9.1"]),
        ("docker/b.sh", "# don't\ntrue  # it's torch==2.9.0\n", []),
        ("docker/b.sh", 'x="a # b" pip install torch==2.9.1\n', [":1: torch==2.9.1"]),
        ("docker/b.sh", "pip freeze | grep -v torch==2.9 > r.txt\npip install torch==2.9.1\n", [":2: torch==2.9.1"]),
        ("Dockerfile", 'FROM x\nRUN grep -iv "torch==2.9|x" a && pip install torch==2.9.1\n', [":2: torch==2.9.1"]),
        ("docker/b.sh", "grep -q torch==2.9.1 r.txt || exit 1\n", [":1: torch==2.9.1"]),
        ("docker/b.sh", 'echo "usage: TORCH_VERSION=2.9.1 $0"\n', []),
        ("docker/b.sh", 'echo "usage: TORCH_VERSION=2.9.1 build.sh"\n', []),
        ("docker/b.sh", "echo 'Usage: TORCH_VERSION=2.9.1 \\$0' >&2; exit 1\n", []),
        ("docker/b.sh", "echo 'TORCH_VERSION=2.9.1' >> env\n", [":1: TORCH_VERSION=2.9.1"]),
        ("docker/b.sh", "echo 'usage TORCH_VERSION=2.9.1' | tee env\n", [":1: TORCH_VERSION=2.9.1"]),
        ("docker/b.sh", "cat <<E\nusage: $0\nTORCH_VERSION=2.9.1\nE\npip install torch==2.9.2\n", [":5: torch==2.9.2"]),
        ("docker/b.sh", "cat >&2 <<-'E'\n\tUsage: torch==2.9.1\n\tE\n", []),
        ("docker/b.sh", "cat <<E > r.txt\nusage:\ntorch==2.9.1\nE\n", [":3: torch==2.9.1"]),
        ("docker/b.sh", "cat <<E | sh\nusage:\ntorch==2.9.1\nE\n", [":3: torch==2.9.1"]),
        ("docker/b.sh", "x=$(cat <<E\nusage:\ntorch==2.9.1\nE\n)\n", [":3: torch==2.9.1"]),
        ("docker/b.sh", "cat <<E\ntorch==2.9.1\nE\n", [":2: torch==2.9.1"]),
        ("docker/b.sh", 'sh -c "\n# x\npip install a#b torch==2.9.1\n"\n', [":3: torch==2.9.1"]),
        ("docker/b.sh", "x='a\n  b # torch==2.9.1\n'\ntrue # torch==2.9.2\n", [":2: torch==2.9.1"]),
        ("docker/b.sh", "echo it's # torch==2.9.1\necho it's\n", []),
        ("Dockerfile", "FROM scratch\nRUN <<E\nx='a\n# torch==2.9.1'\nE\n", [":4: torch==2.9.1"]),
        ("Dockerfile", "FROM scratch\nRUN pip install torch=='2.10.0'\n", [":2: torch==2.10.0"]),
        ("docker/b.sh", 'pip install torch=="2.10.0"\n', [":1: torch==2.10.0"]),
        ("Dockerfile", "FROM scratch\nRUN uv pip install torch@2.10.0 x\n", [":2: torch@2.10.0"]),
        ("docker/b.sh", "uv pip install 'torch[x]@2.13.0' me@torch@2.1 o/torch@2.1 torch@2.1@x\n", []),
        (
            "docker/b.sh",
            "curl ${GH}/flashinfer-ai/flashinfer/archive/refs/tags/v0.6.15.tar.gz\n",
            [":1: flashinfer at v0.6.15"],
        ),
        (
            "Dockerfile",
            "FROM a\nRUN curl https://${GH}/o/flashinfer/releases/download/v0.6.15/x.whl\n",
            [":2: flashinfer at v0.6.15"],
        ),
        ("docker/b.sh", "pip install $X/torch-2.10.0+cu130-cp312-cp312-linux_x86_64.whl\n", [":1: torch-2.10.0+cu130"]),
        ("docker/b.sh", "ls $HOME/flashinfer/0.6.14/ $D/flashinfer/archive/refs/tags/v0.6.16.post3.zip\n", []),
        ("docker/b.sh", "TORCH_VERSION=${1:-2.9.0}\n", [":1: TORCH_VERSION=2.9.0"]),
        ("docker/b.sh", 'export TORCH_VERSION="${TORCH:-2.9.0}"\n', [":1: TORCH_VERSION=2.9.0"]),
        ("docker/b.sh", "TORCH_VERSION=${1:-2.13.0}\nTORCH_VERSION=${1:-}\n", []),
        ("Dockerfile", "FROM scratch\nONBUILD ARG TORCH_VERSION=1.8.0\n", [":2: ARG TORCH_VERSION=1.8.0,"]),
    ],
)
def test_each_place_is_one_finding_or_none(tmp_path: Path, path: str, text: str, expected: list[str]) -> None:
    found = findings(tmp_path, {path: text})
    assert len(found) == len(expected), found
    assert all(want in line for want, line in zip(expected, found, strict=True)), found
