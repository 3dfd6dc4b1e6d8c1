"""What `pipeline versions check` finds in a tree: ARGs, pins, bake files, images, git refs, assignments, labels."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from versions_trees import CUDA, FLASHINFER, TORCH, plant, source, texts

from pipeline.__main__ import main
from pipeline.versions.check import check

VALUES = {"FLASHINFER_VERSION": "0.6.16.post3", "CUDA_VERSION": "13.0.3", "TORCH_VERSION": "2.13.0"}
GOVERNS = {"FLASHINFER_VERSION": FLASHINFER, "CUDA_VERSION": CUDA, "TORCH_VERSION": TORCH}
REACHED = "".join(f"ARG {name}={value}\n" for name, value in VALUES.items()) + "FROM scratch\n"


def tree(root: Path, files: dict[str, str | bytes]) -> Path:
    """A tree without templates in which every name is used."""
    return plant(root, {"versions.json": source(VALUES, GOVERNS), "docker/Dockerfile.reached": REACHED, **files})


def findings(root: Path, files: dict[str, str | bytes]) -> list[str]:
    return texts(check(tree(root, files)).findings)


AT = "https://example.invalid/o"
S = "FROM scratch\n"
FOUND = [
    # ARGs, of every stage
    ("docker/Dockerfile", f"# 1\n{S}ARG FLASHINFER_VERSION=0.6.15.post1\n",
     "docker/Dockerfile:3: ARG FLASHINFER_VERSION=0.6.15.post1, versions.json says 0.6.16.post3"),
    ("docker/Dockerfile", "ARG CUDA_VERSION=13.0.3\nFROM scratch AS a\nARG CUDA_VERSION=12.4.1\n",
     "docker/Dockerfile:3: ARG CUDA_VERSION=12.4.1, versions.json says 13.0.3"),
    ("docker/cuda.Dockerfile", f"{S}ARG TORCH_VERSION=''\n", ":2: ARG TORCH_VERSION=, versions.json says"),
    ("docker/Dockerfile", "ARG NCCL_VERSION=2.29\nFROM scratch\n",
     "docker/Dockerfile:1: ARG NCCL_VERSION=2.29 is not managed: versions.json has no NCCL_VERSION"),
    ("docker/Dockerfile", "ARG torch_version=2.13.0\nFROM scratch\n", "no torch_version; did you mean TORCH_VERSION?"),
    ("Dockerfile", "ARG FOO_VERSION=''\nFROM scratch\nARG FOO_VERSION\n", ":1: ARG FOO_VERSION= is not managed"),
    ("docker/Dockerfile", f'{S}ARG FLASHINFER_GIT_REF="v0.3.1"\n',
     ":2: FLASHINFER_GIT_REF at v0.3.1, versions.json says v0.6.16.post3 (FLASHINFER_VERSION)"),
    ("docker/Dockerfile", f"{S}ENV FLASHINFER_VERSION 0.6.15\n", ":2: FLASHINFER_VERSION=0.6.15, versions.json says"),
    ("docker/Dockerfile", f"{S}ONBUILD ARG TORCH_VERSION=1.8.0\n", ":2: TORCH_VERSION=1.8.0, versions.json says 2.13.0"),
    ("docker/Dockerfile", f"{S}RUN <<EOF\nx\n", ":2: BuildKit refuses this: unterminated heredoc"),
    ("docker/Dockerfile", f'{S}ARG A="1\n', ':2: BuildKit refuses this: "1: unexpected end'),
    # images
    ("Dockerfile", "FROM nvidia/cuda:13.0.2-devel\n", "Dockerfile:1: image nvidia/cuda:13.0.2-devel,"),
    ("Dockerfile", "ARG MINOR=13.0\nFROM nvidia/cuda:${MINOR}.2-base\n",
     "Dockerfile:2: image nvidia/cuda:13.0.2-base, versions.json says 13.0.3 (CUDA_VERSION)"),
    ("Dockerfile", "ARG R\nFROM ${R}/nvidia/cuda:13.0.2-devel\n", ":2: image /nvidia/cuda:13.0.2-devel"),
    ("Dockerfile", "FROM r.invalid:5000/hub/nvidia/cuda:13.0.2-devel\n", ":1: image r.invalid:5000/hub/nvidia/"),
    ("docker/b.sh", "skopeo inspect docker://nvidia/cuda:12.6.0-devel\n", ":1: image /nvidia/cuda:12.6.0-devel,"),
    ("docker/compose.yaml", "a:\n  image: nvidia/cuda:12.9.1\n", "docker/compose.yaml:2: image nvidia/cuda:12.9.1"),
    ("docker-bake.hcl", 'target "a" {\n  contexts = { b = "docker-image://nvidia/cuda:12.6.0-devel" }\n}\n',
     ":2: image /nvidia/cuda:12.6.0-devel,"),
    # bake files
    ("docker/docker-bake.hcl", 'variable "CUDA_VERSION" {\n  default = "13.0.2"\n}\n',
     "docker/docker-bake.hcl:2: CUDA_VERSION=13.0.2, versions.json says 13.0.3"),
    ("docker-bake.hcl", 'variable "FOO_VERSION" {\n  default = ""\n}\n', ":2: variable FOO_VERSION= is not managed"),
    ("docker-bake.hcl", 'target "a" {\n  args = {\n    CUDA_VERSION = "13.0.2"\n  }\n}\n', ":3: CUDA_VERSION=13.0.2,"),
    ("docker/bake.hcl", 'target "a" {\n  dockerfile-inline = <<EOT\nFROM scratch\nARG CUDA_VERSION=1\nEOT\n}\n',
     "docker/bake.hcl:4: CUDA_VERSION=1, versions.json says 13.0.3"),
    ("docker/bake.json", '{"variable":\n {"TORCH_VERSION": {"default": "2.12.0"}}}', ":2: TORCH_VERSION=2.12.0,"),
    # pins in commands and addresses
    ("docker/Dockerfile", f"{S}RUN a && \\\n    pip install flashinfer-python==0.6.15\n",
     "docker/Dockerfile:3: flashinfer-python==0.6.15, versions.json says 0.6.16.post3 (FLASHINFER_VERSION)"),
    ("docker/Dockerfile", f"{S}ARG V=0.6.15\nRUN pip install flashinfer-python==${{V}}\n", ":3: flashinfer-python==0.6.15"),
    ("Dockerfile", f"{S}ENV T=2.1.0\nRUN pip install torch==$T\n", ":3: torch==2.1.0"),
    ("Dockerfile", "FROM scratch AS a\nARG T=2.1.0\nFROM a\nRUN pip install torch==$T\nFROM x\nRUN pip install torch==$T\n",
     ":4: torch==2.1.0"),
    ("Dockerfile", f"{S}RUN pip install torch=='2.10.0'\n", ":2: torch==2.10.0"),
    ("Dockerfile", f"{S}RUN uv pip install torch@2.10.0 x\n", ":2: torch@2.10.0"),
    ("Dockerfile", f"{S}RUN echo '# x' && pip install torch==2.9.0\n", ":2: torch==2.9.0"),
    ("Dockerfile", f"{S}RUN <<E\ntrue # torch==2.9.0\npip install torch==2.9.1\nE\n", ":4: torch==2.9.1"),
    ("docker/b.sh", 'x="a # b" pip install torch==2.9.1\n', ":1: torch==2.9.1"),
    ("docker/b.sh", "cat <<E > r.txt\ntorch==2.9.1\nE\n", ":2: torch==2.9.1"),
    ("docker/b.sh", "pip install $X/torch-2.10.0+cu130-cp312-cp312-linux_x86_64.whl\n", ":1: torch-2.10.0+cu130"),
    ("docker/b.sh", "curl ${GH}/flashinfer-ai/flashinfer/archive/refs/tags/v0.6.15.tar.gz\n", ":1: flashinfer at v0.6.15"),
    ("Dockerfile", "FROM a\nRUN curl https://${GH}/o/flashinfer/releases/download/v0.6.15/x.whl\n", ":2: flashinfer at v0.6"),
    ("Dockerfile", f"{S}ADD {AT}/flashinfer.git#v0.6.15 /x\n", "Dockerfile:2: flashinfer at v0.6.15"),
    ("Dockerfile", f"{S}ADD {AT}/flashinfer.git?tag=v0.6.1 /x\n", ":2: flashinfer at v0.6.1,"),
    ("docker/b.sh", f"git clone {AT}/flashinfer -b v0.6.15 && git clone {AT}/other\n", ":1: flashinfer at v0.6.15"),
    ("docker/Dockerfile.nightly", f"{S}RUN <<EOF\n# git clone -b v0.1 {AT}/flashinfer\n"
     f"git clone --branch v0.6.15 \\\n  {AT}/flashinfer.git\nEOF\n",
     "docker/Dockerfile.nightly:4: flashinfer at v0.6.15, versions.json says v0.6.16.post3"),
    *(("docker/b.sh", f"git clone -b v0.6.15 {address}\n", ":1: flashinfer at v0.6.15")
      for address in ("git@h.invalid:o/flashinfer.git", "ssh://git@h.invalid/o/flashinfer", "https://u:p@h/flashinfer")),
    ("docker/docker-bake.hcl", '/* variable\n*/ variable "CUDA_VERSION" {\n  # default = "13.0.3"\n'
     '  description = "{x} // y"\n  default = "13.0.2"\n}\n', "docker/docker-bake.hcl:5: CUDA_VERSION=13.0.2,"),
    ("docker/compose.yml", "build: {args: {CUDA_VERSION: 12.9.2}}\n", ":1: CUDA_VERSION=12.9.2,"),
    # assignments
    ("docker/build.sh", "#!/bin/sh\ndocker build \\\n  --build-arg CUDA_VERSION=13.0.2 .\n", ":3: CUDA_VERSION=13.0.2,"),
    ("docker/build.sh", "x=${CUDA_VERSION:-13.0.2}\n", "docker/build.sh:1: CUDA_VERSION=13.0.2,"),
    ("docker/b.sh", 'export TORCH_VERSION="${TORCH:-2.9.0}"\n', ":1: TORCH_VERSION=2.9.0"),
    ("docker/x.py", 'FLASHINFER_VERSION: str = "0.6.15"\n', ":1: FLASHINFER_VERSION=0.6.15,"),
    ("docker/x.py", 'A = os.environ.get("TORCH_VERSION", "2.12.0")\n', ":1: TORCH_VERSION=2.12.0,"),
    ("docker/x.py", 'B = getenv("TORCH_VERSION") or "2.12.1"\n', ":1: TORCH_VERSION=2.12.1,"),
    ("docker/Makefile", "TORCH_VERSION ?= 2.9.7\n", ":1: TORCH_VERSION=2.9.7,"),
    ("docker/b.sh", "cmake -DTORCH_VERSION=0.5.5 .\n", ":1: TORCH_VERSION=0.5.5,"),
    # requirements
    ("requirements/cuda.txt", "flashinfer-jit-cache==0.6.16.post3+cu129\n",
     ":1: flashinfer-jit-cache==0.6.16.post3+cu129: cu129, versions.json says 13.0.3 (CUDA_VERSION), so cu130"),
    ("requirements/cuda.txt", "--extra-index-url https://example.invalid/whl/cu129\n",
     ":1: https://example.invalid/whl/cu129: cu129, versions.json says"),
    ("requirements/cuda.txt", "torch>=2\n", ":1: torch>=2 is not pinned, versions.json says 2.13.0"),
    ("requirements/cuda.txt", "-r cuda.txt\n", "requirements/cuda.txt:1: includes itself"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "text", "expected"), FOUND)
def test_what_disagrees_is_one_finding_with_its_line(tmp_path: Path, path: str, text: str, expected: str) -> None:
    (line,) = findings(tmp_path, {path: text})
    assert expected in line


LEFT_ALONE = [
    ("docker/Dockerfile", "ARG CUDA_VERSION=13.0.3\nFROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu24.04\n"),
    ("docker/Dockerfile", f"{S}ARG TORCH_VERSION\nARG LABEL=${{TORCH_VERSION}}-x\n"),
    ("docker/Dockerfile", "ARG CUDA_VERSION=13.0.3\nARG BASE_CUDA_VERSION=${CUDA_VERSION}\nFROM scratch\n"),
    ("docker/Dockerfile", f'{S}ARG TORCH_VERSION="2.13.0"\nRUN pip install "torch==${{TORCH_VERSION}}"\n'),
    ("docker/Dockerfile", f"{S}RUN git clone -b main {AT}/flashinfer\nRUN pip install pyjwt==2.14.0 torchtitan==1.0\n"),
    ("docker/Dockerfile", f"{S}RUN <<EOF\nARG NCCL_VERSION=9.9\nEOF\n"),
    ("docker/Dockerfile", f"{S}RUN true # torch==2.9.0\n"),
    ("docker/Dockerfile", "FROM example.invalid/mirror/python:3.9\n"),
    ("docker/Dockerfile", "FROM r.invalid/my-nvidia/cuda:12.0.0\n"),
    ("docker/Dockerfile.dockerignore", "TORCH_VERSION=1\n"),
    ("docker/docker-bake.hcl", '# variable "CUDA_VERSION" { default = "12" }\n// CUDA_VERSION = "12.1"\n'),
    ("docker/notes.md", "torch==1.0\n"),
    ("docker/data.bin", "\0\0TORCH_VERSION=1"),
    ("docker/b.sh", f"git clone {AT}/other -b v0.6.15 && git clone {AT}/flashinfer\n"),
    ("docker/b.sh", "TORCH_VERSION=\nexport X\nprintf 'TORCH_VERSION=%s\\n'\nTORCH_VERSION=${1:-2.13.0}\n"),
    ("docker/b.sh", 'sed "s/TORCH_VERSION=.*/x/"\necho "TORCH_VERSION: the version of torch"\n# don\'t\ntrue  # torch==2.9\n'),
    ("docker/b.sh", "uv pip install 'torch[x]@2.13.0' me@torch@2.1 o/torch@2.1 torch@2.1@x\n"),
    ("docker/b.sh", "ls $HOME/flashinfer/0.6.14/ $D/flashinfer/archive/refs/tags/v0.6.16.post3.zip\n"),
    ("docker/x.py", 'TORCH_VERSION = os.environ.get("TORCH_VERSION", "2.13.0")\n'),
    ("requirements/cuda.txt", "torch==2.13.0+cu130\npyjwt>=2.14.0\n--find-links https://example.invalid/whl/cu130\n"),
    ("requirements/cuda.txt", "torch==2.13 ; python_version > '3'\n"),
    ("elsewhere/requirements.txt", "torch==1\n"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "text"), LEFT_ALONE)
def test_what_agrees_is_left_alone(tmp_path: Path, path: str, text: str) -> None:
    assert findings(tmp_path, {path: text}) == []


def test_a_bake_value_without_quotes_is_read(tmp_path: Path) -> None:
    found = findings(
        tmp_path,
        {
            "docker/docker-bake.hcl": 'variable "TORCH_VERSION" {\n  default = 3.12\n}\nargs = { CUDA_VERSION = 3.9 }\n',
            "docker/bake.json": '{"variable": {"TORCH_VERSION": {"default": 3.13}},\n "args": {"CUDA_VERSION": 3.8}}',
        },
    )
    assert [line.partition(", versions")[0] for line in found] == [
        "docker/bake.json:1: TORCH_VERSION=3.13",
        "docker/bake.json:2: CUDA_VERSION=3.8",
        "docker/docker-bake.hcl:2: TORCH_VERSION=3.12",
        "docker/docker-bake.hcl:4: CUDA_VERSION=3.9",
    ]


def test_what_is_unmanaged_on_purpose(tmp_path: Path) -> None:
    text = "FROM scratch\nARG OS_VERSION=1 UCX_VERSION=2 NIXL_VERSION=3\n"
    root = tree(tmp_path, {"docker/Dockerfile": text})
    plant(root, {"versions.json": source(VALUES, GOVERNS, unmanaged=["OS_VERSION", "UCX_*"])})
    assert texts(check(root).findings) == [
        "docker/Dockerfile:2: ARG NIXL_VERSION=3 is not managed: versions.json has no NIXL_VERSION"
    ]


def test_a_name_that_nothing_uses(tmp_path: Path) -> None:
    bake = 'variable "A_VERSION" { default = "1" }\n'
    root = plant(tmp_path, {"versions.json": source({"A_VERSION": "1", "B_VERSION": "2"}, {}), "docker/bake.hcl": bake})
    assert texts(check(root).findings) == [
        "versions.json:6: B_VERSION is unused: no ARG, pin or bake argument references it"
    ]


def test_the_tree_of_another_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A versions file elsewhere, without `governs`, with a comment and ARGs that it does not manage."""
    variables = {
        "CUDA_VERSION": "13.0.2",
        "FLASHINFER_VERSION": "0.6.8.post1",
        "TIMM_VERSION": ">=1.0.17",
        "ARCHS": "8.0 9.0",
        "MAX_JOBS": "2",
        "EMPTY": "",
    }
    whole = {"_comment": "generated", "variable": {name: {"default": value} for name, value in variables.items()}}
    args = "\n".join(f'ARG {name}="{value}"' for name, value in variables.items())
    dockerfile = f"{args}\nARG OTHER_VERSION=1\nFROM nvidia/cuda:${{CUDA_VERSION}}-devel-ubuntu22.04 AS base\n"
    files = {
        "docker/versions.json": json.dumps(whole),
        "templates/page.j2": "{{ title }}",
        "docker/Dockerfile": dockerfile,
        "docker/Dockerfile.cpu": "FROM scratch\nARG CUDA_VERSION=12.8 jobs=32\n"
        "ENV MAX_JOBS=$jobs CUDA_VERSION=${jobs:+13}\n",
        "docker/docker-bake.hcl": 'variable "ARCHS" {\n  default = "8.0 10.0"\n}\n',
        "requirements/cuda.txt": "flashinfer-python==0.6.8.post1\nflashinfer-cubin==0.6.7\ntorch==2.11.0\n",
    }
    root = plant(tmp_path, files)
    assert main(["versions", "check", "--root", str(root), "--versions", "docker/versions.json"]) == 3
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "docker/Dockerfile.cpu:2: ARG CUDA_VERSION=12.8, docker/versions.json says 13.0.2",
        "docker/docker-bake.hcl:2: ARCHS=8.0 10.0, docker/versions.json says 8.0 9.0",
        "requirements/cuda.txt:2: flashinfer-cubin==0.6.7, docker/versions.json says 0.6.8.post1 (FLASHINFER_VERSION)",
    ]
    assert "docker/versions.json has no `governs`" in captured.err
    assert main(["versions", "check", "--root", str(root)]) == 2
    assert "name that folder: --root DIR" in capsys.readouterr().err


def test_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path, {"docker/a,b:c%.Dockerfile": "FROM scratch\nARG TORCH_VERSION=1\n"})
    words = ["versions", "check", "--root", str(root), "--format"]
    assert main([*words, "text"]) == 3
    assert capsys.readouterr().out == "docker/a,b:c%.Dockerfile:2: ARG TORCH_VERSION=1, versions.json says 2.13.0\n"
    assert main([*words, "json"]) == 3
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["path"], row["line"], row["rule"]) == ("docker/a,b:c%.Dockerfile", 2, "ARG")
    assert main([*words, "github"]) == 3
    assert capsys.readouterr().out == (
        "::error file=docker/a%2Cb%3Ac%25.Dockerfile,line=2,title=versions::"
        "ARG TORCH_VERSION=1, versions.json says 2.13.0\n"
    )
    (root / "docker/a,b:c%.Dockerfile").unlink()
    for how, out in (("text", ""), ("github", ""), ("json", "[]\n")):
        assert main([*words, how]) == 0
        assert capsys.readouterr().out == out


def test_usages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path, {"docker/x.sh": "TORCH_VERSION=2.12.0\n", "requirements/a.txt": "torch==2.13.0\n"})
    assert main(["versions", "usages", "TORCH_VERSION", "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[:3] == [
        "docker/Dockerfile.reached:3: ARG: ARG TORCH_VERSION=2.13.0",
        "docker/x.sh:1: value: TORCH_VERSION=2.12.0  <- versions.json says 2.13.0",
        "requirements/a.txt:1: pin: torch==2.13.0",
    ]
    assert main(["versions", "usages", "torch", "--root", str(root)]) == 2
    assert "`pipeline versions usages TORCH_VERSION`" in capsys.readouterr().err


def test_a_login_in_an_address_is_not_printed(tmp_path: Path) -> None:
    run = "RUN pip install --index-url https://me:secret@h.invalid/cu128 x\n"
    lines = "x @ oops https://me:secret@h.invalid/x\ntorch @ https://me:secret@h.invalid/torch.zip\n"
    found = findings(tmp_path, {"docker/Dockerfile": S + run, "requirements/a.txt": lines})
    assert len(found) == 3 and "secret" not in "".join(found)


def test_a_circle_of_includes_is_found_in_each_of_its_files(tmp_path: Path) -> None:
    found = findings(tmp_path, {"requirements/a.txt": "-r b.txt\nsix==1.0\n", "requirements/b.txt": "-r a.txt\n"})
    assert found == [
        "requirements/a.txt:1: includes itself: requirements/b.txt -> requirements/a.txt -> requirements/b.txt",
        "requirements/b.txt:1: includes itself: requirements/a.txt -> requirements/b.txt -> requirements/a.txt",
    ]


def test_what_is_no_ordinary_file_is_a_finding_and_not_waited_for(tmp_path: Path) -> None:
    root = tree(tmp_path / "tree", {"requirements/a.txt": "six==1.0\n"})
    plant(tmp_path, {"outside/Dockerfile": "ARG TORCH_VERSION=1\nFROM scratch\n"})
    os.mkfifo(root / "docker/pipe")
    (root / "docker/Dockerfile").symlink_to(tmp_path / "outside/Dockerfile")
    (root / "docker/gone").symlink_to("nothing")
    (root / "docker/circle").symlink_to("circle")
    plant(root, {"docker/a.Dockerfile": "#\n" * (1 << 21) + "\nFROM scratch\n", "docker/big.bin": "\0" * (1 << 23)})
    assert [line.partition(":")[0] for line in texts(check(root).findings)] == [
        "docker/Dockerfile",
        "docker/a.Dockerfile",
        "docker/circle",
        "docker/gone",
        "docker/pipe",
    ]


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        ("docker/Dockerfile.x", [f"ARG A{n}=$A{n - 1}\nRUN echo $A1 \\\n  && true" for n in range(2_000)]),
        (
            "docker/x.sh",
            ["git clone -b main https://example.invalid/o/x TORCH_VERSION=2.13.0 nvidia/cuda:13.0.3"] * 5_000,
        ),
        ("requirements/a.txt", [f"p{n}==1.0 \\\n  --hash=sha256:0" for n in range(5_000)]),
    ],
    ids=["dockerfile", "script", "pins"],
)
def test_a_large_file_takes_seconds(tmp_path: Path, path: str, lines: list[str]) -> None:
    above = "FROM scratch AS s0\n" if "Dockerfile" in path else ""
    began = time.process_time()
    findings(tmp_path, {path: above + "\n".join(lines) + "\n"})
    assert time.process_time() - began < 20  # quadratic, it takes minutes
