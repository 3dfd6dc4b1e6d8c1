"""Audit: what it finds in a repository that is not built this way, how sure it is, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from versions_trees import plant

from pipeline.__main__ import main
from pipeline.versions.audit import Confidence, Disagreement, judge, look
from pipeline.versions.audit.hcl_tree import read_hcl_tree
from pipeline.versions.bake import read_hcl

ROOT = Path(__file__).resolve().parents[2]

HCL = """# "no"
variable "A" { default = "1.2" }
variable "B" {
  default = "x${A}"
}
group "default" { targets = ["a", "b"] }
target "t" {
  args = { A = A, "C" = "3"
    D = "4"
  }
  dockerfile-inline = <<EOT
FROM x
ARG Q=1
EOT
  tags = ["nvidia/cuda:13.0.2"]
}
"""


def audit(tmp_path: Path, files: dict[str, str | bytes]) -> list[Disagreement]:
    return judge(look(plant(tmp_path, files)).places)


def summary(found: list[Disagreement], least: Confidence = Confidence.LIKELY) -> list[tuple[str, str, list[str]]]:
    """Name, confidence and values of every disagreement that is at least so sure, in their order."""
    return [
        (one.name, one.confidence.name.lower(), sorted(value for value, _ in one.values))
        for one in found
        if one.confidence >= least
    ]


# Written after what a large project of this field carried in one release.
DRIFT: dict[str, str | bytes] = {
    "docker/Dockerfile": "ARG CUDA_VERSION=13.0.3\nARG PYTHON_VERSION=3.12\nFROM nvidia/cuda:${CUDA_VERSION}-base AS b\n"
    "ARG max_jobs=2\n",
    "docker/docker-bake.hcl": 'variable "MAX_JOBS" {\n  default = "16"\n}\ntarget "t" { args = { max_jobs = MAX_JOBS } }\n',
    ".buildkite/release.yaml": 'steps:\n  - commands:\n      - "docker build --build-arg CUDA_VERSION=13.0.2 ."\n',
    "requirements/cuda.txt": "torch==2.14.0\nflashinfer-python==0.7.2.post1\npyjwt>=2.14.0\n",
    "requirements/build.txt": "torch==2.14.0+cu130\n",
    "pkg/kernels/__init__.py": 'FLASHINFER_VERSION = "0.7.2"\nSCHEMA_VERSION = "3.1"\n',
    "pkg/other.py": 'SCHEMA_VERSION = "4.0"\n',
    "tests/fixtures/Dockerfile": "FROM scratch\nARG CUDA_VERSION=11.8.0\n",
    "tests/test_x.py": 'CUDA_VERSION = "9.9.9"\n',
    "pyproject.toml": '[project]\nname = "x"\ndependencies = ["torch>=2.10"]\n',
}


def test_the_drift_of_a_real_release_is_found(tmp_path: Path) -> None:
    found = audit(tmp_path, DRIFT)
    assert summary(found) == [
        ("CUDA_VERSION", "likely", ["13.0.2", "13.0.3"]),
        ("FLASHINFER_VERSION", "likely", ["0.7.2", "0.7.2.post1"]),
    ]
    assert "MAX_JOBS" in [name for name, _, _ in summary(found, Confidence.POSSIBLE)]
    cuda = next(one for one in found if one.name == "CUDA_VERSION")
    places = {(place.path, place.line, place.kind) for _, group in cuda.values for place in group}
    assert places == {("docker/Dockerfile", 1, "ARG"), (".buildkite/release.yaml", 3, "build-arg")}
    assert cuda.why == "a build argument against the value that the build files give"


@pytest.mark.parametrize(
    ("files", "name", "confidence"),
    [
        ({"Dockerfile": "FROM a AS x\nARG V_VERSION=1.1\nFROM b\nARG V_VERSION=1.2\n"}, "V_VERSION", "certain"),
        ({"r/requirements.txt": "foo==1.0\nfoo==1.1\n"}, "foo", "certain"),
        (
            {
                "Dockerfile": "FROM a\nARG V_VERSION=1.1\n",
                "docker-bake.json": '{"variable": {"V_VERSION": {"default": "1.2"}}}',
            },
            "V_VERSION",
            "certain",
        ),
        (
            {"requirements.txt": "flashinfer-python==0.6.14\nflashinfer-cubin==0.6.13\n"},
            "flashinfer-cubin",
            "likely",
        ),
        (
            {"requirements.txt": "torch==2.9\n", "pyproject.toml": '[project]\ndependencies = ["torch>=2.10"]\n'},
            "torch",
            "likely",
        ),
        (
            {"Dockerfile": "FROM a\nARG NUMPY_VERSION=1.1\n", "requirements.txt": "numpy==1.2\n"},
            "NUMPY_VERSION",
            "likely",
        ),
        (
            {"a.yml": "env:\n  NCCL_VERSION: 2.29.1\n", "Dockerfile": "FROM a\nARG NCCL_VERSION=2.28.0\n"},
            "NCCL_VERSION",
            "likely",
        ),
        (
            {"a.sh": 'NCCL_VERSION="2.29.1"\n', "Dockerfile": "FROM a\nARG NCCL_VERSION=2.28.0\n"},
            "NCCL_VERSION",
            "likely",
        ),
        ({"Dockerfile.a": "FROM x/y:1.1-z\n", "Dockerfile.b": "FROM x/y:1.2-z\n"}, "x/y", "likely"),
        ({"Dockerfile": "FROM a\nRUN pip install foo==1.1\n", "requirements.txt": "foo==1.2\n"}, "foo", "likely"),
        ({"requirements/cpu.txt": "foo==1.1\n", "requirements/rocm.txt": "foo==1.2\n"}, "foo", "possible"),
        (
            {"a/Dockerfile": "FROM a\nARG N_VERSION=1\n", "b/Dockerfile": "FROM a\nARG N_VERSION=2\n"},
            "N_VERSION",
            "possible",
        ),
        ({"Dockerfile": "FROM python:3.12-slim\n", "Dockerfile.x": "FROM python:3.11-slim\n"}, "python", "possible"),
    ],
)
def test_how_sure_it_is(tmp_path: Path, files: dict[str, str | bytes], name: str, confidence: str) -> None:
    found = summary(audit(tmp_path, files), Confidence.POSSIBLE)
    assert [sure for one, sure, _ in found if one == name] == [confidence]


def test_a_stronger_disagreement_hides_no_weaker_one_of_its_name(tmp_path: Path) -> None:
    found = audit(
        tmp_path,
        {
            "Dockerfile": "FROM a\nARG V_VERSION=1.1\nFROM b\nARG V_VERSION=1.2\n",
            "ci.yml": "- run: docker build --build-arg V_VERSION=1.3 .\n- run: docker build --build-arg V_VERSION=1.1 .\n",
            "code.py": 'V_VERSION = "1.4"\n',
            "rocm/Dockerfile": "FROM a\nARG V_VERSION=1.5\n",
        },
    )
    assert summary(found, Confidence.POSSIBLE) == [
        ("V_VERSION", "certain", ["1.1", "1.2"]),
        ("V_VERSION", "likely", ["1.1", "1.2", "1.3", "1.4"]),
        ("V_VERSION", "possible", ["1.1", "1.2", "1.3", "1.4", "1.5"]),
    ]
    why = [one.why for one in found]
    assert why[0] == "one Dockerfile gives the ARG two defaults"
    assert why[2].count("; ") == 2 and "for different variants (rocm)" in why[2]


FOUR = "FROM a\nARG NCCL_VERSION=2.28.4\n"


@pytest.mark.parametrize(
    ("path", "text", "line"),
    [
        (".github/workflows/a.yml", "- with:\n    build-args: |\n      X=1\n      NCCL_VERSION=2.29.1\n", 4),
        ("a.yml", "run: >\n  docker build --build-arg NCCL_VERSION=2.29.1 .\n", 2),
        ("a.yml", "args: ['--build-arg', 'NCCL_VERSION=2.29.1']\n", 1),
        ("a.yml", "args:\n- --build-arg\n- NCCL_VERSION=2.29.1\n", 3),
        ("compose.yaml", "services:\n  a:\n    build:\n      args:\n        - NCCL_VERSION=2.29.1\n", 5),
        ("compose.yaml", "services:\n  a:\n    build:\n      args:\n        NCCL_VERSION: '2.29.1'\n", 5),
        ("pod.yaml", "env:\n  - name: NCCL_VERSION\n    value: '2.29.1'\n", 3),
        ("compose.yaml", "services:\n  a:\n    environment:\n      - NCCL_VERSION=2.29.1\n", 4),
        ("Dockerfile.b", "FROM a\nRUN x && \\\n  export NCCL_VERSION=2.29.1\n", 3),
        ("Dockerfile.b", "FROM a\nRUN NCCL_VERSION=2.29.1 && x\n", 2),
        ("Dockerfile.b", "FROM a\nENV A=1 NCCL_VERSION=2.29.1\n", 2),
        ("Dockerfile.b", "FROM a\nENV NCCL_VERSION 2.29.1\n", 2),
        ("docker/a/Dockerfile", "FROM a\nENV NCCL_VERSION=2.29.1\n", 2),
        ("build.sh", "docker build --build-arg NCCL_VERSION=2.29.1 .\n", 1),
        ("build.sh", "docker build --build-arg 'NCCL_VERSION=2.29.1' .\n", 1),
        ("Makefile", "x:\n\tdocker build --build-arg=NCCL_VERSION=2.29.1 .\n", 2),
    ],
)
def test_every_form_of_a_value_is_compared_with_the_argument(tmp_path: Path, path: str, text: str, line: int) -> None:
    found = audit(tmp_path, {path: text, "Dockerfile": FOUR})
    assert summary(found) == [("NCCL_VERSION", "likely", ["2.28.4", "2.29.1"])]
    assert (path, line) in {(place.path, place.line) for _, group in found[0].values for place in group}


GIT = "https://h.invalid/o"


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        (
            "Dockerfile",
            "FROM a\nRUN pip install https://h.invalid/w/torch-2.10.0+cu128-cp312-cp312-linux_x86_64.whl\n",
            (2, "pin", "torch", "2.10.0+cu128"),
        ),
        (
            "requirements.txt",
            "torch @ https://h.invalid/torch-2.10.0%2Bcu128-cp312.whl\n",
            (1, "pin", "torch", "2.10.0+cu128"),
        ),
        ("a.sh", "pip install $W/torch-2.10.0-cp312.whl\n", (1, "pin", "torch", "2.10.0")),
        ("a.sh", f"pip install \\\n  git+{GIT}/lib.git@v1.2\n", (2, "git", "lib", "v1.2")),
        ("a.sh", "curl ${GH}/o/lib/archive/refs/tags/v1.2.tar.gz\n", (1, "git", "lib", "v1.2")),
        ("a.sh", f"V=v1.2\ngit clone {GIT}/lib x\ncd x\ngit checkout $V\n", (4, "git", "lib", "v1.2")),
        ("a.yml", f"- run: |\n    git clone {GIT}/lib\n    cd lib\n    git checkout v1.2\n", (4, "git", "lib", "v1.2")),
        ("Dockerfile", f"FROM a\nRUN <<E\ngit clone \\\n  -b v1.2 {GIT}/lib\nE\n", (4, "git", "lib", "v1.2")),
        (
            "Dockerfile",
            f"FROM a AS b\nWORKDIR /s\nRUN git clone {GIT}/lib\nFROM b\nRUN cd lib && git checkout v1.2\n",
            (5, "git", "lib", "v1.2"),
        ),
        ("install", f"#!/usr/bin/env bash\ngit clone -b v1.2 {GIT}/lib\n", (2, "git", "lib", "v1.2")),
        ("install", "#!/bin/sh\nexport NCCL_VERSION=2.29.1\n", (2, "shell", "NCCL_VERSION", "2.29.1")),
        ("a.sh", "pip install torch=='2.10.0'\n", (1, "pin", "torch", "2.10.0")),
        ("a.sh", "uv pip install torch@2.10.0\n", (1, "pin", "torch", "2.10.0")),
    ],
)
def test_what_commands_pin(tmp_path: Path, path: str, text: str, found: tuple[int, str, str, str]) -> None:
    places = look(plant(tmp_path, {path: text})).places
    assert [(place.line, place.kind, place.name, place.value) for place in places] == [found]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("install", "NCCL_VERSION=2.29.1\n"),
        ("a.sh", f"git clone {GIT}/lib && cd lib && git checkout 0263a6a6\n"),
        ("a.sh", "if [ $torch == 2.9 ]; then x; fi\n"),
        ("a.sh", "true # pip install torch==2.9\npip freeze | grep -v torch==2.9\n"),
        ("a.sh", "pip install 'torch==2.9.*'\nnpm install torch@2.9\n"),
        ("Dockerfile", "FROM a\nRUN true # torch==2.9\n"),
        ("a.yml", "- uses: actions/checkout@v4\n- uses: docker/x@1.2\n"),
        ("a.sh", "cat <<E\nUsage: CUDA_VERSION=12.0 $0\nCUDA_VERSION=12.1\ntorch==2.9\nE\n"),
    ],
)
def test_what_commands_do_not_pin(tmp_path: Path, path: str, text: str) -> None:
    assert look(plant(tmp_path, {path: text})).places == []


@pytest.mark.parametrize("text", ["container: x/y:2.1-z\n", "container:\n  image: x/y:2.1-z\n", "image: x/y:2.1-z\n"])
def test_images_that_jobs_run_in_are_compared(tmp_path: Path, text: str) -> None:
    found = audit(
        tmp_path,
        {"a.yml": f"jobs:\n  a:\n    {text}".replace("\n  image", "\n      image"), "Dockerfile": "FROM x/y:2.2-z\n"},
    )
    assert summary(found) == [("x/y", "likely", ["2.1", "2.2"])]


@pytest.mark.parametrize(
    "text",
    [
        "FROM a\nENV NCCL_VERSION=$NCCL_VERSION\n",
        "FROM a\nENV NCCL_VERSION=${X}.1\n",
        "FROM a\nENV NCCL_VERSION=stable\n",
        "FROM a\nRUN export NCCL_VERSION=$(x --version)\n",
        "FROM a\nENV NCCL_VERSION=2.28.4\n",
    ],
)
def test_what_an_environment_takes_from_elsewhere_is_no_value(tmp_path: Path, text: str) -> None:
    assert audit(tmp_path, {"Dockerfile": FOUR, "Dockerfile.b": text}) == []


def test_assignments_of_one_name_are_compared_without_anything_built(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "ci/a.yml": "env:\n  NCCL_VERSION: 2.28.1\n",
        "ci/b.sh": "export NCCL_VERSION=2.28.2\n",
        "pkg/c.py": 'NCCL_VERSION = "2.28.3"\nNODE_VERSION = "20.1"\n',
        "ci/d.sh": "export NODE_VERSION=22.1\n",
    }
    found = audit(tmp_path, files)
    assert summary(found) == [("NCCL_VERSION", "likely", ["2.28.1", "2.28.2", "2.28.3"])]
    assert summary(found, Confidence.POSSIBLE)[1:] == [("NODE_VERSION", "possible", ["20.1", "22.1"])]
    scripts: dict[str, str | bytes] = {"x/a.sh": "A_VERSION=1.0\n", "x/b.sh": "A_VERSION=2.0\n"}
    assert summary(judge(look(plant(tmp_path / "two", scripts)).places)) == []
    assert len(judge(look(tmp_path / "two").places)) == 1


def test_variants_are_one_entry(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        f"requirements/{name}.txt": f"foo==1.{at}\n" for at, name in enumerate(("cpu", "rocm", "xpu"))
    }
    assert summary(audit(tmp_path, files), Confidence.POSSIBLE) == [("foo", "possible", ["1.0", "1.1", "1.2"])]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a/requirements.txt": "torch==2.10.0\n", "Dockerfile": "FROM a\nRUN pip install torch==2.10.0+cu130\n"}, []),
        (
            {"requirements.txt": "torch==2.9.0+cu130\n", "Dockerfile": "FROM a\nRUN pip install torch==2.10.0\n"},
            [("torch", "likely", ["2.10.0", "2.9.0+cu130"])],
        ),
        (
            {"a.sh": "pip install torch==2.10.0\n", "requirements.txt": "torch==2.9.0\n", "b/requirements.txt": "torch==2.9.0+cu130\n"},
            [("torch", "possible", ["2.10.0", "2.9.0"])],
        ),
        (
            {"requirements.txt": "torch==2.10.0+cu128\n", "Dockerfile": "FROM a\nRUN pip install torch==2.10.0+cu130\n"},
            [("torch", "likely", ["2.10.0+cu128", "2.10.0+cu130"])],
        ),
        (
            {"requirements.txt": "torch==2.10.0+cu128\n", "Dockerfile": "ARG CUDA_VERSION=13.0.3\nFROM a\n"},
            [("torch", "likely", ["13.0.3", "2.10.0+cu128"])],
        ),
        ({"requirements.txt": "torch==2.10.0+cu130\n", "Dockerfile": "ARG CUDA_VERSION=13.0.3\nFROM a\n"}, []),
        (
            {"requirements/cu128.txt": "torch==2.10.0+cu128\n", "requirements/cu130.txt": "torch==2.10.0+cu130\n"},
            [("torch", "possible", ["2.10.0+cu128", "2.10.0+cu130"])],
        ),
        (
            {"requirements.txt": "torch==2.10.0+rocm6.3\n", "Dockerfile.rocm": "ARG ROCM_VERSION=6.4.1\nFROM a\n"},
            [("torch", "likely", ["2.10.0+rocm6.3", "6.4.1"])],
        ),
        ({"requirements.txt": "torch==2.10.0+rocm6.4\n", "Dockerfile.rocm": "ARG ROCM_VERSION=6.4.1\nFROM a\n"}, []),
        ({"requirements.txt": "torch==2.10.0+rocm6.4.1\n", "Dockerfile.rocm": "ARG ROCM_VERSION=6.4\nFROM a\n"}, []),
        (
            {"requirements.txt": "torch==2.10.0+rocm6.4\n", "Dockerfile": "FROM a\nRUN pip install torch==2.10.0+rocm6.3\n"},
            [("torch", "likely", ["2.10.0+rocm6.3", "2.10.0+rocm6.4"])],
        ),
    ],
)  # fmt: skip
def test_local_labels(
    tmp_path: Path, files: dict[str, str | bytes], expected: list[tuple[str, str, list[str]]]
) -> None:
    assert summary(audit(tmp_path, files), Confidence.POSSIBLE) == expected


def test_what_is_said_together_is_not_said_again(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "Dockerfile": "FROM a\nARG V_VERSION=1.1\nFROM b\nARG V_VERSION=1.2\n",
        "docker-bake.json": '{"variable": {"V_VERSION": {"default": "1.3"}}}',
    }
    assert summary(audit(tmp_path, files), Confidence.POSSIBLE) == [("V_VERSION", "certain", ["1.1", "1.2", "1.3"])]


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ('X = os.environ.get("NCCL_VERSION", "2.29.1")', 1),
        ("\n\nX = os.getenv(\n    'NCCL_VERSION',\n    default='2.29.1')", 4),
        ('X = environ.get("NCCL_VERSION") or "2.29.1"', 1),
        ('os.environ.setdefault("NCCL_VERSION", "2.29.1")', 1),
    ],
)
def test_what_code_falls_back_to_is_compared(tmp_path: Path, code: str, line: int) -> None:
    found = audit(tmp_path, {"x.py": f"{code}\n", "Dockerfile": "FROM a\nARG NCCL_VERSION=2.28.0\n"})
    assert summary(found) == [("NCCL_VERSION", "likely", ["2.28.0", "2.29.1"])]
    assert ("x.py", line) in {(place.path, place.line) for _, group in found[0].values for place in group}


@pytest.mark.parametrize(
    "code", ['# X = os.environ.get("N_VERSION", "1.0")', 'os.environ.get("N_VERSION", "")', 'f("N_VERSION", "1.0")']
)
def test_what_is_no_fallback(tmp_path: Path, code: str) -> None:
    assert audit(tmp_path, {"x.py": f"{code}\n", "Dockerfile": "FROM a\nARG N_VERSION=2.28.0\n"}) == []


@pytest.mark.parametrize(
    "files",
    [
        {"requirements.txt": "torch==2.14.0\npyjwt>=2.14.0\nzentorch==2.14.0.1\n"},
        {"requirements/a.txt": "torch==2.14.0+cpu\n", "requirements/b.txt": "torch==2.14.0+cu130\ntorch==2.14\n"},
        {"Dockerfile": "ARG V_VERSION=13.0.3\nFROM x\n", "Dockerfile.b": "ARG V_VERSION=13.0\nFROM x\n"},
        {"Dockerfile": "ARG V_VERSION=1\nFROM x\nARG V_VERSION\nARG W_VERSION=${V_VERSION}\n"},
        {"Dockerfile": "FROM x\nRUN <<EOF\nARG V_VERSION=1\nEOF\nARG V_VERSION=2\n"},
        {"Dockerfile": "# ARG V_VERSION=1\nARG V_VERSION=2\nFROM x\n"},
        {"a.py": 'API_VERSION = "1.0"\n', "b.py": 'API_VERSION = "2.0"\n'},
        {"a.py": 'X_VERSION = "1.0"\n', "b.py": 'X_VERSION = "2.0"\n'},
        {"Dockerfile": "ARG MIN_CUDA_VERSION=12.0\nARG CUDA_VERSION=13.0.3\nFROM x\n"},
        {
            "ci.yml": "a: docker build --build-arg CUDA_VERSION=12.9.1\nb: docker build --build-arg CUDA_VERSION=13.0.3\n"
        },
        {"Dockerfile": "ARG V_VERSION=1.0\nFROM x\n", "node_modules/a/Dockerfile": "ARG V_VERSION=2.0\nFROM x\n"},
        {"Dockerfile": "ARG V_VERSION=1.0\nFROM x\n", "tests/data/Dockerfile": "ARG V_VERSION=2.0\nFROM x\n"},
        {
            "docker/Dockerfile": "ARG V_VERSION=1.0\nFROM x\n",
            "templates/Dockerfile.j2": "ARG V_VERSION={{ V }}\nFROM x\n",
        },
        {"requirements.txt": 'a==1; python_version < "3.10"\na==2; python_version >= "3.10"\n'},
        {"mkdocs/requirements.txt": "mkdocstrings==1.0.6\nmkdocstrings-python==2.0.8\n"},
        {"Dockerfile": "ARG TIMM_VERSION='>=1.0.17'\nFROM x\n", "requirements.txt": "timm==1.0.17\n"},
        {"README.md": "CUDA_VERSION=1.0\n", "Dockerfile": "ARG CUDA_VERSION=2.0\nFROM x\n"},
    ],
)
def test_what_is_no_disagreement(tmp_path: Path, files: dict[str, str | bytes]) -> None:
    assert summary(audit(tmp_path, files)) == []


def test_this_checkout_has_none() -> None:
    assert summary(judge(look(ROOT).places)) == []


def test_a_test_requirement_is_a_pin_all_the_same(tmp_path: Path) -> None:
    found = audit(tmp_path, {"requirements/test/a.txt": "foo==1.1\n", "requirements/a.txt": "foo==1.2\n"})
    assert summary(found) == [("foo", "likely", ["1.1", "1.2"])]


def test_what_cannot_be_read_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files: dict[str, str | bytes] = {
        "bad.yaml": "a: [1\nCUDA_VERSION: 1\n",
        "bake.hcl": 'variable "X {\n',
        "docker-bake.json": '{"variable": ',
        "pyproject.toml": "[x",
        "helm.yaml": "a: {{ .Values.x }}\nCUDA_VERSION: 1.0\n",
        "weights.sh": b"\0\0\0 CUDA_VERSION=1",
        "huge.sh": b"CUDA_VERSION=9.9\n" * 70000,
    }
    root = plant(tmp_path, files)
    (root / "Dockerfile").symlink_to("nothing")
    assert main(["versions", "audit", str(root), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["path"] for row in answer["unreadable"]] == [
        "Dockerfile",
        "bad.yaml",
        "bake.hcl",
        "docker-bake.json",
        "pyproject.toml",
    ]
    assert "(line 2)" in answer["unreadable"][1]["why"]
    assert answer["passed_over"] == 2 and answer["files"] == 8


def test_the_text_is_strongest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files: dict[str, str | bytes] = {**DRIFT, "x/Dockerfile": "FROM a\nARG V_VERSION=1.0\nFROM b\nARG V_VERSION=2.0\n"}
    root = plant(tmp_path, files)
    assert main(["versions", "audit", str(root)]) == 3
    captured = capsys.readouterr()
    heads = [line.partition(":")[0] for line in captured.out.splitlines() if not line.startswith(" ")]
    assert heads == ["certain", "likely", "likely"]
    assert "  1.0  x/Dockerfile:2 (ARG V_VERSION)" in captured.out
    assert "3 findings in" in captured.err and "weaker" in captured.err
    assert main(["versions", "audit", str(root), "--all", "--json"]) == 3
    assert len(json.loads(capsys.readouterr().out)["findings"]) > 3


def test_what_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["versions", "audit", str(tmp_path / "gone")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_both_readers_of_hcl_see_the_same() -> None:
    own = [text for text in read_hcl(HCL) if not (text.value.startswith("${") and text.value.endswith("}"))]
    theirs = read_hcl_tree(HCL)
    assert [(text.path, text.line, text.value.strip()) for text in own] == [
        (text.path, text.line, text.value.strip()) for text in theirs
    ]
    rendered = (ROOT / "docker" / "docker-bake.hcl").read_text(encoding="utf-8")
    plain = [text for text in read_hcl(rendered) if not text.value.startswith("${")]
    assert plain == read_hcl_tree(rendered)
