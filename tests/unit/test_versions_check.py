"""Rendering, and what `pipeline versions check` finds with and without templates."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from versions_trees import CUDA, FLASHINFER, plant, source, texts

from pipeline.__main__ import main
from pipeline.versions import drift, load
from pipeline.versions.render import render
from pipeline.versions.sync import SyncRefused, sync
from pipeline.versions.templates import TemplatesInvalid, target

ROOT = Path(__file__).resolve().parents[2]
VALUES = {"FLASHINFER_VERSION": "0.6.16.post3", "CUDA_VERSION": "13.0.3", "TORCH_VERSION": "2.13.0"}
RELATIONS = {"FLASHINFER_VERSION": FLASHINFER, "CUDA_VERSION": CUDA}


def tree(tmp_path: Path, files: dict[str, str | bytes], **more: str) -> Path:
    """A tree without templates in which every name reaches something."""
    reached = "".join(f"ARG {name}={value}\n" for name, value in {**VALUES, **more}.items()) + "FROM scratch\n"
    base = {"versions.json": source({**VALUES, **more}, RELATIONS), "docker/Dockerfile.reached": reached}
    return plant(tmp_path, {**base, **files})


def findings(tmp_path: Path, files: dict[str, str | bytes], **more: str) -> list[str]:
    return texts(drift(tree(tmp_path, files, **more)))


def templated(tmp_path: Path) -> Path:
    root = plant(
        tmp_path,
        {
            "versions.json": source({"A_VERSION": "1.2", "B": "x-${A_VERSION}"}),
            "templates/Dockerfile.j2": "ARG A_VERSION={{ A_VERSION }}\nFROM scratch\nARG B={{ B }}\n",
            "templates/requirements/all.txt.j2": "{% if true %}\na=={{ A_VERSION }}\n{% endif %}\n",
            "templates/_part.j2": "never rendered",
        },
    )
    sync(root, load(root))
    return root


def test_this_checkout_agrees() -> None:
    assert texts(drift(ROOT)) == []


def test_templates_go_where_their_folder_says() -> None:
    assert target("Dockerfile.j2") == "docker/Dockerfile"
    assert target("requirements/host.txt.j2") == "requirements/host.txt"
    assert target("docker/x/Dockerfile.j2") == "docker/x/Dockerfile"


def test_sync_writes_whole_files_once_and_deletes_nothing(tmp_path: Path) -> None:
    root = templated(tmp_path)
    assert (root / "docker/Dockerfile").read_text() == "ARG A_VERSION=1.2\nFROM scratch\nARG B=x-1.2\n"
    assert (root / "requirements/all.txt").read_text() == "a==1.2\n"
    assert not (root / "docker/_part").exists()
    plant(root, {"docker/by-hand": "kept"})
    before = (root / "docker/Dockerfile").stat().st_mtime_ns
    assert sync(root, load(root)) == []
    assert (root / "docker/Dockerfile").stat().st_mtime_ns == before
    assert (root / "docker/by-hand").read_text() == "kept"
    (root / "requirements/all.txt").chmod(0o600)
    plant(root, {"requirements/all.txt": "changed"})
    assert sync(root, load(root)) == ["requirements/all.txt"]
    assert (root / "requirements/all.txt").stat().st_mode & 0o777 == 0o600


def test_sync_writes_nothing_through_a_link_out_of_the_tree(tmp_path: Path) -> None:
    root = templated(tmp_path / "tree")
    outside = plant(tmp_path, {"outside": "untouched"}) / "outside"
    (root / "docker/Dockerfile").unlink()
    (root / "docker/Dockerfile").symlink_to(outside)
    with pytest.raises(SyncRefused, match="link out of the tree"):
        sync(root, load(root))
    assert outside.read_text() == "untouched"
    assert any("docker/Dockerfile: is a link out of the tree" in text for text in texts(drift(root)))


def test_a_changed_file_is_found_with_a_diff(tmp_path: Path) -> None:
    root = templated(tmp_path)
    plant(root, {"docker/Dockerfile": "ARG A_VERSION=1.2\nFROM scratch\nARG B=x-1.2\n# by hand\n"})
    (found,) = drift(root)
    assert found.text() == "docker/Dockerfile:4: differs from its template; run `pipeline versions sync`"
    assert "-# by hand" in found.diff


def test_a_missing_file_is_found(tmp_path: Path) -> None:
    root = templated(tmp_path)
    (root / "requirements/all.txt").unlink()
    assert texts(drift(root)) == ["requirements/all.txt: is missing; `pipeline versions sync` writes it"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "x\n{{ A_VERSIN }}\n{{ B }}{{ A_VERSION }}",
            "templates/Dockerfile.j2:2: A_VERSIN has no version in versions.json",
        ),
        ("{{ A_VERSION }", "templates/Dockerfile.j2:1: not a template"),
        ("{% if %}", "templates/Dockerfile.j2:1: not a template"),
        ("{{ A_VERSION }}{{ B.x.y }}", "templates/Dockerfile.j2: cannot be rendered"),
        ("{{ A_VERSION + 1 }}{{ B }}", "templates/Dockerfile.j2: cannot be rendered"),
        ("{{ A_VERSION }}", "versions.json:6: B reaches no template"),
        (b"\xff", "templates/Dockerfile.j2: is not UTF-8"),
        ('{% include "gone" %}{{ A_VERSION }}{{ B }}', "templates/Dockerfile.j2: cannot be rendered: there is no gone"),
    ],
)
def test_a_bad_template_has_its_place(tmp_path: Path, template: str | bytes, expected: str) -> None:
    root = plant(tmp_path, {"versions.json": source({"A_VERSION": "1", "B": "2"}), "templates/Dockerfile.j2": template})
    with pytest.raises(TemplatesInvalid) as caught:
        render(root, load(root))
    assert any(expected in line for line in texts(caught.value.findings)), texts(caught.value.findings)
    assert main(["versions", "check", "--root", str(root)]) == 2
    assert main(["versions", "sync", "--root", str(root)]) == 2
    assert not (root / "docker").exists()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than 5 s"),
        ('{{ "x" * (10 ** 11) }}', "takes more than 1024 MiB"),
    ],
)
def test_a_template_without_end_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, expected: str
) -> None:
    template = "ARG A_VERSION={{ A_VERSION }}\nFROM scratch\n" + body
    root = plant(tmp_path, {"versions.json": source({"A_VERSION": "1"}), "templates/Dockerfile.j2": template})
    assert main(["versions", "check", "--root", str(root)]) == 2
    assert f"templates/Dockerfile.j2: cannot be rendered: {expected}; is there" in capsys.readouterr().out


def test_macros_and_what_jinja_defines_are_no_versions(tmp_path: Path) -> None:
    files = {
        "versions.json": source({"A_VERSION": "1", "B_VERSION": "2"}),
        "templates/_part.j2": "{% macro arg(name, value) %}ARG {{ name }}={{ value }}{% endmacro %}",
        "templates/Dockerfile.j2": (
            '{% from "_part.j2" import arg as given %}{% import "_part.j2" as part %}'
            '{{ given("A_VERSION", A_VERSION) }}\n{{ part.arg("B_VERSION", B_VERSION) }}\nFROM scratch\n'
            "{% for one in [1, 2] %}# {{ loop.index }}\n{% endfor %}"
        ),
    }
    root = plant(tmp_path, files)
    assert render(root, load(root)).files == {
        "docker/Dockerfile": b"ARG A_VERSION=1\nARG B_VERSION=2\nFROM scratch\n# 1\n# 2\n"
    }


def test_fix_waits_for_whoever_changes_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = templated(tmp_path)
    held: list[bool] = []

    def write(_root: Path, _versions: object) -> list[str]:
        handle = os.open(root, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.append(True)
        finally:
            os.close(handle)
        return ["docker/Dockerfile"]

    monkeypatch.setattr("pipeline.versions.sync.sync", write)
    assert main(["versions", "check", "--fix", "--root", str(root)]) == 0
    assert held == [True] and "wrote docker/Dockerfile" in capsys.readouterr().err


def test_a_bad_template_hides_no_other_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = templated(tmp_path)
    plant(root, {"templates/bad.j2": "{% if %}", "docker/x.Dockerfile": "FROM scratch\nARG A_VERSION=2\n"})
    assert main(["versions", "check", "--root", str(root)]) == 2
    out = capsys.readouterr().out
    assert "templates/bad.j2:1: not a template" in out
    assert "docker/x.Dockerfile:2: ARG A_VERSION=2, versions.json says 1.2" in out


def test_a_pin_that_no_version_governs_is_found_beside_templates(tmp_path: Path) -> None:
    root = templated(tmp_path)
    plant(root, {"requirements/extra.txt": "other==1\n"})
    assert texts(drift(root)) == [
        "requirements/extra.txt:1: other==1 is written outside versions.json; templates/ takes every version from it"
    ]


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        (
            "docker/Dockerfile",
            "# 1\nFROM scratch\nARG FLASHINFER_VERSION=0.6.15.post1\n",
            "docker/Dockerfile:3: ARG FLASHINFER_VERSION=0.6.15.post1, versions.json says 0.6.16.post3",
        ),
        (
            "docker/Dockerfile",
            "ARG CUDA_VERSION=13.0.3\nFROM scratch AS a\nARG CUDA_VERSION=12.4.1\n",
            "docker/Dockerfile:3: ARG CUDA_VERSION=12.4.1, versions.json says 13.0.3",
        ),
        (
            "docker/cuda.Dockerfile",
            "FROM scratch\nARG TORCH_VERSION=''\n",
            ":2: ARG TORCH_VERSION=, versions.json says",
        ),
        (
            "docker/build.image",
            "ARG TORCH_VERSION=2\nFROM scratch\n",
            "docker/build.image:1: ARG TORCH_VERSION=2,",
        ),
        (
            "Dockerfile",
            "FROM nvidia/cuda:13.0.2-devel\n",
            "Dockerfile:1: image nvidia/cuda:13.0.2-devel,",
        ),
        (
            "docker/Dockerfile",
            "ARG NCCL_VERSION=2.29\nFROM scratch\n",
            "docker/Dockerfile:1: ARG NCCL_VERSION=2.29 is not managed: versions.json has no NCCL_VERSION",
        ),
        (
            "docker/Dockerfile",
            "ARG torch_version=2.13.0\nFROM scratch\n",
            'versions.json has no torch_version; did you mean "TORCH_VERSION"?',
        ),
        (
            "docker/Dockerfile",
            'FROM scratch\nARG FLASHINFER_GIT_REF="v0.3.1"\n',
            "docker/Dockerfile:2: FLASHINFER_GIT_REF at v0.3.1, versions.json says v0.6.16.post3 (FLASHINFER_VERSION)",
        ),
        (
            "docker/Dockerfile",
            "ARG MINOR=13.0\nFROM nvidia/cuda:${MINOR}.2-base\n",
            "docker/Dockerfile:2: image nvidia/cuda:13.0.2-base, versions.json says 13.0.3 (CUDA_VERSION)",
        ),
        (
            "docker/Dockerfile",
            "FROM scratch\nRUN a && \\\n    pip install flashinfer-python==0.6.15\n",
            "docker/Dockerfile:3: flashinfer-python==0.6.15, versions.json says 0.6.16.post3 (FLASHINFER_VERSION)",
        ),
        (
            "docker/Dockerfile",
            "FROM scratch\nARG V=0.6.15\nRUN pip install flashinfer-python==${V}\n",
            "docker/Dockerfile:3: flashinfer-python==0.6.15, versions.json says",
        ),
        (
            "docker/Dockerfile.nightly",
            "FROM scratch\nRUN <<EOF\n# git clone -b v0.1 https://example.invalid/o/flashinfer\n"
            "git clone --branch v0.6.15 \\\n  https://example.invalid/o/flashinfer.git\nEOF\n",
            "docker/Dockerfile.nightly:4: flashinfer at v0.6.15, versions.json says v0.6.16.post3",
        ),
        (
            "docker/Dockerfile",
            "FROM scratch\nADD https://example.invalid/o/flashinfer.git#v0.6.15 /x\n",
            "docker/Dockerfile:2: flashinfer at v0.6.15",
        ),
        (
            "docker/Dockerfile",
            "FROM scratch\nENV FLASHINFER_VERSION 0.6.15\n",
            "docker/Dockerfile:2: FLASHINFER_VERSION=0.6.15, versions.json says",
        ),
        (
            "docker/Dockerfile",
            "FROM scratch\nONBUILD ARG TORCH_VERSION=1\n",
            "docker/Dockerfile:2: ARG TORCH_VERSION=1, versions.json says 2.13.0",
        ),
        (
            "docker/Dockerfile",
            "FROM scratch\nRUN <<EOF\nx\n",
            ":2: BuildKit refuses this: the heredoc <<EOF",
        ),
        (
            "docker/Dockerfile",
            'FROM scratch\nARG A="1\n',
            ':2: BuildKit refuses this: "1: a double quote',
        ),
        (
            "docker/docker-bake.hcl",
            'variable "CUDA_VERSION" {\n  default = "13.0.2"\n}\n',
            "docker/docker-bake.hcl:2: variable CUDA_VERSION=13.0.2, versions.json says 13.0.3",
        ),
        (
            "docker-bake.hcl",
            'target "a" {\n  args = {\n    CUDA_VERSION = "13.0.2"\n  }\n}\n',
            "docker-bake.hcl:3: argument CUDA_VERSION=13.0.2, versions.json says 13.0.3",
        ),
        (
            "docker/bake.hcl",
            'target "a" {\n  dockerfile-inline = <<EOT\nFROM scratch\nARG CUDA_VERSION=1\nEOT\n}\n',
            "docker/bake.hcl:4: ARG CUDA_VERSION=1, versions.json says 13.0.3",
        ),
        (
            "docker/bake.json",
            '{"variable":\n {"TORCH_VERSION": {"default": "2.12.0"}}}',
            "docker/bake.json:2: variable TORCH_VERSION=2.12.0, versions.json says 2.13.0",
        ),
        ("docker/bake.json", '{"variable": ', "docker/bake.json:1: ends where a value is expected"),
        (
            "docker/build.sh",
            "#!/bin/sh\ndocker build \\\n  --build-arg CUDA_VERSION=13.0.2 .\n",
            "docker/build.sh:3: CUDA_VERSION=13.0.2, versions.json says 13.0.3",
        ),
        (
            "docker/build.sh",
            "x=${CUDA_VERSION:-13.0.2}\n",
            "docker/build.sh:1: CUDA_VERSION=13.0.2,",
        ),
        ("docker/compose.yaml", "a:\n  image: nvidia/cuda:12.9.1\n", "docker/compose.yaml:2: image nvidia/cuda:12.9.1"),
        (
            "requirements/cuda.txt",
            "flashinfer-jit-cache==0.6.16.post3+cu129\n",
            "requirements/cuda.txt:1: flashinfer-jit-cache==0.6.16.post3+cu129: cu129, versions.json says 13.0.3 "
            "(CUDA_VERSION), so cu130",
        ),
        (
            "requirements/cuda.txt",
            "--extra-index-url https://example.invalid/whl/cu129\n",
            "requirements/cuda.txt:1: https://example.invalid/whl/cu129: cu129, versions.json says",
        ),
        (
            "requirements/cuda.txt",
            "torch[cu12]==2.13.0\n",
            "requirements/cuda.txt:1: torch[cu12]==2.13.0: cu12, versions.json",
        ),
        (
            "requirements/cuda.txt",
            "torch>=2\n",
            "requirements/cuda.txt:1: torch>=2 is not pinned, versions.json says 2.13.0",
        ),
        ("requirements/cuda.txt", "-r cuda.txt\n", "requirements/cuda.txt:1: includes itself"),
    ],
)
def test_what_disagrees_is_named(tmp_path: Path, path: str, text: str, expected: str) -> None:
    found = findings(tmp_path, {path: text})
    assert any(expected in line for line in found), found


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("docker/Dockerfile", "ARG CUDA_VERSION=13.0.3\nFROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu24.04\n"),
        ("docker/Dockerfile", "FROM scratch\nARG TORCH_VERSION\nARG LABEL=${TORCH_VERSION}-x\n"),
        ("docker/Dockerfile", "ARG CUDA_VERSION=13.0.3\nARG BASE_CUDA_VERSION=${CUDA_VERSION}\nFROM scratch\n"),
        ("docker/Dockerfile", 'FROM scratch\nARG TORCH_VERSION="2.13.0"\nRUN pip install "torch==${TORCH_VERSION}"\n'),
        ("docker/Dockerfile", "FROM scratch\nRUN git clone -b main https://example.invalid/o/flashinfer\n"),
        ("docker/Dockerfile", "FROM scratch\nRUN pip install pyjwt==2.14.0 torchtitan==1.0\n"),
        ("docker/Dockerfile", "FROM example.invalid/mirror/python:3.9\n"),
        ("docker/Dockerfile.dockerignore", "TORCH_VERSION=1\n"),
        ("docker/notes.md", "torch==1.0\n"),
        ("docker/data.bin", "\0\0TORCH_VERSION=1"),
        (
            "requirements/cuda.txt",
            "torch==2.13.0+cu130\npyjwt>=2.14.0\n--find-links https://example.invalid/whl/cu130\n",
        ),
        ("requirements/cuda.txt", "torch==2.13 ; python_version > '3'\n"),
        ("requirements/notes.md", "torch==1\n"),
        ("elsewhere/requirements.txt", "torch==1\n"),
    ],
)
def test_what_agrees_is_left_alone(tmp_path: Path, path: str, text: str) -> None:
    assert findings(tmp_path, {path: text}) == []


def test_an_ill_named_arg_in_a_heredoc_is_none(tmp_path: Path) -> None:
    assert findings(tmp_path, {"docker/Dockerfile": "FROM scratch\nRUN <<EOF\nARG NCCL_VERSION=9.9\nEOF\n"}) == []


def test_a_value_that_depends_on_the_frontend_must_be_right_under_each(tmp_path: Path) -> None:
    text = "FROM scratch\nARG A=2.13.0 TORCH_VERSION=$A\n"
    assert findings(tmp_path, {"docker/Dockerfile": text}) == [
        "docker/Dockerfile:2: ARG TORCH_VERSION=, versions.json says 2.13.0"
    ]
    assert findings(tmp_path, {"docker/Dockerfile": "# syntax=docker/dockerfile:1\n" + text}) == []


def test_what_is_unmanaged_on_purpose(tmp_path: Path) -> None:
    root = tree(tmp_path, {"docker/Dockerfile": "FROM scratch\nARG OS_VERSION=1 UCX_VERSION=2 NIXL_VERSION=3\n"})
    whole = json.loads((root / "versions.json").read_text())
    plant(root, {"versions.json": json.dumps({**whole, "unmanaged": ["OS_VERSION", "UCX_*"]})})
    assert texts(drift(root)) == [
        "docker/Dockerfile:2: ARG NIXL_VERSION=3 is not managed: versions.json has no NIXL_VERSION"
    ]


def test_one_cause_is_one_finding(tmp_path: Path) -> None:
    text = "ARG CUDA_VERSION=13.0.2\nFROM nvidia/cuda:${CUDA_VERSION}-devel\nRUN echo nvidia/cuda:${CUDA_VERSION}\n"
    assert len(findings(tmp_path, {"docker/Dockerfile": text})) == 1


def test_a_name_that_reaches_nothing(tmp_path: Path) -> None:
    bake = 'variable "A_VERSION" { default = "1" }\ntarget "t" { args = { B_VERSION = B_VERSION } }\n'
    versions = source({"A_VERSION": "1", "B_VERSION": "2"})
    root = plant(tmp_path, {"versions.json": versions, "docker/bake.hcl": bake})
    assert texts(drift(root)) == ["versions.json:3: A_VERSION reaches no ARG, pin or bake argument"]


def test_names_that_another_is_made_of_reach_what_it_reaches(tmp_path: Path) -> None:
    relations = {"PYTHON_IMAGE_VERSION": {"packages": [], "images": ["python"], "extends": "PYTHON_VERSION"}}
    values = {
        "PYTHON_VERSION": "3.11",
        "PYTHON_IMAGE_VERSION": "3.11.14",
        "BASE": "python:${PYTHON_IMAGE_VERSION}-slim",
    }
    root = plant(
        tmp_path,
        {
            "versions.json": source(values, relations),
            "docker/Dockerfile": "ARG BASE=python:3.11.14-slim\nFROM ${BASE}\n",
        },
    )
    assert drift(root) == []
    plant(root, {"versions.json": source({**values, "PYTHON_VERSION": "3.12"}, relations)})
    assert texts(drift(root)) == [
        "versions.json:6: PYTHON_IMAGE_VERSION is 3.11.14, which does not begin with 3.12 (PYTHON_VERSION)"
    ]


def test_names_that_move_together(tmp_path: Path) -> None:
    values = {"A_VERSION": "1.0", "A_EXTRA_VERSION": "1.1"}
    root = plant(
        tmp_path,
        {
            "versions.json": source(values, {"A_EXTRA_VERSION": {"same_as": "A_VERSION"}}),
            "docker/Dockerfile": "ARG A_VERSION=1.0 A_EXTRA_VERSION=1.1\nFROM scratch\n",
        },
    )
    assert texts(drift(root)) == ["versions.json:6: A_EXTRA_VERSION is 1.1, A_VERSION is 1.0; they move together"]


def test_a_value_that_a_pin_needs_must_be_a_version(tmp_path: Path) -> None:
    root = plant(tmp_path, {"versions.json": source({"X_VERSION": "1.x"}), "requirements/a.txt": "x==1.0\n"})
    assert "versions.json:3: X_VERSION=1.x is not a version (PEP 440)" in texts(drift(root))


def test_links_and_files_that_vanish(tmp_path: Path) -> None:
    root = tree(tmp_path / "tree", {})
    plant(tmp_path, {"outside/Dockerfile": "ARG TORCH_VERSION=1\nFROM scratch\n"})
    (root / "docker/Dockerfile").symlink_to(tmp_path / "outside/Dockerfile")
    (root / "docker/gone").symlink_to("nothing")
    (root / "docker/folder").symlink_to(tmp_path / "outside")
    (root / "docker/circle.sh").symlink_to("circle.sh")
    (root / "docker/inside.Dockerfile").symlink_to("Dockerfile.reached")
    (root / "requirements").symlink_to(tmp_path / "outside")
    assert texts(drift(root)) == [
        "docker/Dockerfile: is a link out of the tree; it is not read",
        "docker/circle.sh: is a link in a circle",
        "docker/folder: is a link out of the tree; it is not read",
        "docker/gone: is a link to nothing",
        "requirements: is a link out of the tree; it is not read",
    ]


def test_a_file_that_vanishes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path, {"docker/Dockerfile": "FROM scratch\n"})
    real = Path.read_bytes

    def vanish(path: Path) -> bytes:
        if path.name == "Dockerfile":
            path.unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", vanish)
    assert texts(drift(root)) == ["docker/Dockerfile: is missing"]


def test_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path, {"docker/a,b:c%.Dockerfile": "FROM scratch\nARG TORCH_VERSION=1\n"})
    assert main(["versions", "check", "--root", str(root), "--format", "text"]) == 3
    assert capsys.readouterr().out == "docker/a,b:c%.Dockerfile:2: ARG TORCH_VERSION=1, versions.json says 2.13.0\n"
    assert main(["versions", "check", "--root", str(root), "--format", "json"]) == 3
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["path"], row["line"], row["rule"]) == ("docker/a,b:c%.Dockerfile", 2, "ARG")
    assert main(["versions", "check", "--root", str(root), "--format", "github"]) == 3
    assert capsys.readouterr().out == (
        "::error file=docker/a%2Cb%3Ac%25.Dockerfile,line=2,title=versions::"
        "ARG TORCH_VERSION=1, versions.json says 2.13.0\n"
    )


def test_a_clean_tree_prints_nothing_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path, {})
    for how in ("text", "github"):
        assert main(["versions", "check", "--root", str(root), "--format", how]) == 0
        assert capsys.readouterr().out == ""
    assert main(["versions", "check", "--root", str(root), "--format", "json"]) == 0
    assert capsys.readouterr().out == "[]\n"


def test_a_bad_source_is_printed_in_the_chosen_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = plant(tmp_path, {"versions.json": '{"variable": {"A": {"default": "1",}, "A": {}}}'})
    assert main(["versions", "check", "--root", str(root), "--format", "github"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.startswith("::error file=versions.json,line=1,col=") for line in lines)


def test_fix_renders_and_then_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = templated(tmp_path)
    plant(root, {"docker/Dockerfile": "FROM scratch\n"})
    assert main(["versions", "check", "--root", str(root)]) == 3
    assert main(["versions", "check", "--root", str(root), "--fix"]) == 0
    assert "wrote docker/Dockerfile" in capsys.readouterr().err


def test_a_note_is_no_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path, {"requirements/a.txt": "-r gone.txt\n"})
    assert main(["versions", "check", "--root", str(root)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "requirements/a.txt:1: includes gone.txt, which is not there" in captured.err


def test_check_imports_neither_the_engine_nor_what_is_slow() -> None:
    code = "import sys; from pipeline.__main__ import main; main(['check']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ}
    )
    loaded = set(done.stdout.split())
    assert loaded.isdisjoint(
        {"docker", "pydantic", "rich", "hcl2", "yaml", "requests", "pipeline.run", "huggingface_hub"}
    )
