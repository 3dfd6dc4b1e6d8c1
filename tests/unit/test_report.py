"""report.html: what it says of an image, and that it is one file that any browser can show, read aloud and print."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from cache_samples import manifest

from pipeline.contract.manifest import Covered
from pipeline.contract.verdict import Verdict
from pipeline.report.facts import Cache, Facts, keep, kept, layers_of, of_server, of_tuner
from pipeline.report.page import page
from pipeline.report.run import docker, kubernetes
from pipeline.servers.judge import Summary
from pipeline.servers.manifest import Served, ServerManifest

IDENTITY = f"sha256:{'a' * 64}"
COLD = {"import": 21.0, "inspect the model": 19.0, "compile and capture": 131.0, "serve": 24.0, "decode": 0.2}
WARM = {"import": 20.0, "inspect the model": 0.0, "compile and capture": 22.0, "serve": 19.0, "decode": 0.2}
SERVER = ServerManifest(
    server="vllm",
    environment={},
    secrets=(),
    versions={"vllm": "0.26.0"},
    hashed=(),
    device="NVIDIA H200",
    sets=(
        Served(
            ("--model", "/mnt/models", "--tensor-parallel-size", "2"), {}, Summary(195.0, COLD), Summary(61.0, WARM)
        ),
    ),
    caches={"torch-compile": 25_000_000, "triton": 3_000_000},
    notes=("a note with <b>markup</b>",),
)


def verdict(*findings: str) -> Verdict:
    return Verdict(
        identity=IDENTITY,
        cache_diff_id="",
        manifest_sha256="",
        key="vllm/1234",
        device="NVIDIA H200",
        level="replay",
        result="fail" if findings else "pass",
        checks={"starts": 2, "kinds": 2},
        findings=findings,
        starts={"as 0:0": {**WARM, "ready": 61.5}},
    )


def common(**change: Any) -> dict[str, Any]:
    layers = layers_of(["sha256:1", "sha256:2"], [{"Size": 0}, {"Size": 7, "CreatedBy": "COPY"}, {"Size": 9}])
    given = {"image": "team/llama:warm", "model": "llama", "size": 9_000_000_000, "digests": {"identity": IDENTITY}}
    return {**given, "layers": tuple(layers), "verdict": None, "steps": {}, **change}


def server(**change: Any) -> Facts:
    return of_server(SERVER, ["vllm", "serve"], common(**change))


def tuner() -> Facts:
    def row(bucket: int, ratio: float, decided: str) -> Covered:
        return Covered("qkv", bucket, f"entry {bucket}", "TiledRunner", 3, 8, 0, 0.9, 1.0, "", ratio, 0.01, decided)

    made, _ = manifest()
    made = replace(made, covered=(row(1, 0.9, "faster"), row(8, 1.0, "default")))
    return of_tuner([made], Cache("flashinfer-autotune", "/opt/flashinfer_autotune_cache", 900), "", common())


class Read(HTMLParser):
    """The text of a page, its elements, and every address in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.tags, self.addresses, self.figures = "", [], [], 0
        self.described = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.addresses += [
            value for name, value in given.items() if name in ("src", "href", "action", "srcset", "data")
        ]
        if tag == "figure":
            self.figures += 1
            self.described += given.get("role") == "img" and bool(given.get("aria-label"))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_server_s_page_shows_its_starts_caches_and_how_to_run_it() -> None:
    read = Read(page(server(verdict=verdict(), steps={"warm up": 400.0, "verify": 130.0})))
    for said in ("cold", "195.0", "warm", "61.0", "baked, as 0:0", "61.5", "torch-compile", "25.0 MB", "0.26.0"):
        assert said in read.text
    assert "hit in 2 of 2 starts" in read.text and "400.0 s" in read.text and IDENTITY in read.text
    assert "a note with <b>markup</b>" in read.text and "b" not in read.tags
    assert read.figures == read.described == 3  # starts, caches, steps; each has a table, too


def test_every_phase_is_named_below_the_plot_and_inside_it() -> None:
    plot = page(server()).partition("<svg")[2].partition("</svg>")[0]
    height = float(re.findall(r'viewBox="0 0 \d+ (\d+)"', plot)[0])
    top = float(re.findall(r'translate\(\d+, (\d+)\)" class="legends"', plot)[0])
    names = {
        name: top + float(y) for y, name in re.findall(r'<text x="[\d.]+" y="([\d.]+)">([a-z ]+)</text></g>', plot)
    }
    assert set(names) == {"import", "inspect the model", "compile and capture", "serve"}
    assert max(names.values()) < height, "a name lies below the plot, where nobody sees it"


def test_a_kind_that_was_missed_is_named_as_such() -> None:
    read = Read(page(server(verdict=verdict("as 0:0: triton missed: 3 new files"))))
    assert "do not use this image" in read.text and "triton missed: 3 new files" in read.text
    assert "hit in" not in read.text


def test_an_image_without_a_verdict_says_so() -> None:
    read = Read(page(server()))
    assert "Not verified on this host" in read.text and "No baked start is known here" in read.text


def test_the_tuner_s_page_compares_with_the_default_by_op_and_bucket() -> None:
    read = Read(page(tuner()))
    assert "10.0 ± 1.0 %" in read.text and "faster" in read.text and "default" in read.text
    assert read.figures == read.described == 1


@pytest.mark.parametrize("facts", [server(verdict=verdict()), tuner()])
def test_the_page_is_one_file_without_scripts_that_asks_no_network(facts: Facts) -> None:
    text = page(facts)
    read = Read(text)
    assert "script" not in read.tags and read.addresses == ["data:,"]
    assert "url(" not in text and "@import" not in text and "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    assert text == page(facts)


def test_the_commands_run_the_image_as_it_was_warmed_up() -> None:
    facts = server()
    line = "docker run --rm --gpus all -v /your/model:/mnt/models:ro team/llama:warm --model /mnt/models"
    assert docker(facts).startswith(line)
    assert docker(facts, "unix:///run/other.sock").startswith("DOCKER_HOST=unix:///run/other.sock docker run")
    spec = yaml.safe_load(kubernetes(facts))
    container = spec["containers"][0]
    assert container["args"] == list(SERVER.sets[0].arguments) and "command" not in container
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert container["volumeMounts"][0]["name"] == spec["volumes"][0]["name"]


def test_a_verdict_and_the_steps_are_kept_by_the_image_s_identity(tmp_path: Path) -> None:
    assert kept(tmp_path, IDENTITY) == (None, {})
    keep(tmp_path, verdict(), {"bake": 2.0})
    assert kept(tmp_path, IDENTITY) == (verdict(), {"bake": 2.0})
    next((tmp_path / "reports").iterdir()).write_text("{")
    assert kept(tmp_path, IDENTITY) == (None, {})


@pytest.mark.large
@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("facts", [server(verdict=verdict()), tuner()])
def test_a_browser_shows_it_without_a_complaint_and_no_request_leaves_it(
    facts: Facts, scheme: str, tmp_path: Path
) -> None:
    """In Chromium, at phone width. Its content security policy makes each request, and each script, a complaint."""
    chromium = shutil.which("chromium")
    assert chromium, "needs Debian's chromium: apt install chromium"
    (tmp_path / "report.html").write_text(page(facts), encoding="utf-8")
    measure = (
        "const d = f.contentDocument, e = d.documentElement;"
        "document.title = (e.scrollWidth <= e.clientWidth) + getComputedStyle(d.body).backgroundColor"
    )
    (tmp_path / "phone.html").write_text(
        f'<iframe id=f src=report.html width=390 height=800 onload="{measure}"></iframe>', encoding="utf-8"
    )
    done = subprocess.run(
        [
            chromium, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
            "--disable-background-networking", "--enable-logging=stderr", "--allow-file-access-from-files",
            f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", "--dump-dom",
            f"file://{tmp_path / 'phone.html'}",
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    paper = "rgb(21, 24, 27)" if scheme == "dark" else "rgb(255, 255, 255)"
    assert ":CONSOLE:" not in done.stderr, done.stderr
    assert f"<title>true{paper}</title>" in done.stdout, "it is wider than a phone, or has another theme's colours"
