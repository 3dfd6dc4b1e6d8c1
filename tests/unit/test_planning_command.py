"""`pipeline plan` as a person types it: output, bad input, exit codes."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.contract.plan import Plan
from pipeline.planning.find import find_model

ROOT = Path(__file__).resolve().parents[2]
FIXED = ("--flashinfer-version", "0.6.16.post3")


def refused(capsys, *words):
    assert main(["plan", *words, *FIXED]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert "hint: " in captured.err
    return captured.err


def test_table_and_json_are_the_same_plan(capsys, tmp_path):
    out = tmp_path / "deep" / "plan.json"
    assert main(["plan", "tiny", "--tp", "2", *FIXED, "--output", str(out)]) == 0
    table = capsys.readouterr().out
    assert main(["plan", "tiny", "--tp", "2", *FIXED, "--json"]) == 0
    plan = Plan.from_json(json.loads(capsys.readouterr().out))
    assert plan.digest in table
    assert Plan.from_json(json.loads(out.read_text())) == plan
    assert plan.layout.tp == 2
    assert plan.device == "cpu"


def test_version_comes_from_versions_json(capsys):
    from pipeline.versions import load

    assert main(["plan", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flashinfer_version"] == load(ROOT)["FLASHINFER_VERSION"]


def test_empty_options_count_as_not_given(capsys):
    empty = [
        word for name in ("tp", "ep", "device", "arch", "max-tokens", "buckets", "ops") for word in (f"--{name}", "")
    ]
    assert main(["plan", "tiny", *FIXED, *empty, "--json"]) == 0
    with_empty = capsys.readouterr().out
    assert main(["plan", "tiny", *FIXED, "--json"]) == 0
    assert capsys.readouterr().out == with_empty


def test_ranges_of_buckets_are_plain_numbers_in_the_plan(capsys):
    assert main(["plan", "tiny", *FIXED, "--buckets", "64,1,8-32:8,8", "--json"]) == 0
    ranges = capsys.readouterr().out
    assert {tuple(op["buckets"]) for op in json.loads(ranges)["ops"]} == {(1, 8, 16, 24, 32, 64)}
    assert main(["plan", "tiny", *FIXED, "--buckets", "1,8,16,24,32,64", "--json"]) == 0
    assert capsys.readouterr().out == ranges


@pytest.mark.parametrize("spelled", ["90a", "9.0a", "9.0", "sm_90a", "SM90a", "90"])
def test_one_architecture_many_spellings(capsys, spelled):
    assert main(["plan", "tiny", *FIXED, "--arch", spelled, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["device"], value["arch"]) == ("cuda", "90a")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny", "--tp", "0"], "TP=0 is out of range"),
        (["tiny", "--tp", "-1"], "TP=-1 is out of range"),
        (["tiny", "--tp", "three"], "TP=three is not a whole number"),
        (["tiny", "--tp", "٣"], "is not a whole number"),
        (["tiny", "--tp", "3"], "TP=3 does not divide 4 attention heads"),
        (["tiny", "--ep", "2"], "tiny has no experts"),
        (["tiny-moe", "--tp", "1", "--ep", "2"], "EP=2 does not divide the 1 ranks"),
        (["tiny", "--pp", "3"], "PP=3 is more than 2 layers"),
        (["DeepSeek-V3", "--tp", "32", "--arch", "90a"], "gate_up 576 channels per rank, not whole"),
        (["tiny", "--device", "tpu"], "neither cpu nor cuda"),
        (["tiny", "--device", "cuda"], "--device cuda needs --arch"),
        (["tiny", "--device", "cpu", "--arch", "90a"], "no processor"),
        (["tiny", "--arch", "h300"], "no GPU or GPU architecture"),
        (["tiny", "--buckets", "1,2,x"], "--buckets=x is not a whole number"),
        (["tiny", "--buckets", "0"], "--buckets=0 is out of range"),
        (["tiny", "--buckets", "8-16"], "--buckets=8-16 has no step"),
        (["tiny", "--buckets", "8-250:8"], "--buckets=8-250:8 does not reach 250"),
        (["tiny", "--buckets", "1-1048576:1"], "--buckets names 1048576 token counts"),
        (["tiny", "--buckets", "1,8-256:8", "--max-tokens", "64"], "bucket 256 is above --max-tokens=64"),
        (["tiny", "--buckets", "1,256", "--max-tokens", "64"], "above --max-tokens=64"),
        (["tiny", "--max-tokens", "1e3"], "not a whole number"),
        (["tiny", "--ops", "qvk"], "did you mean qkv?"),
        (["tiny", "--skip-ops", "bf16gemm"], "did you mean bf16_gemm?"),
        (["tiny", "--arch", "90a", "--backends", "mm_bf16"], "names no backend"),
        (["tiny", "--arch", "90a", "--backends", "mm_bf16=tgv"], "does not exist on 90a"),
        (["tiny", "--arch", "90a", "--backends", "mm_bf16=cublaslt,mm_bf16=tinygemm"], "mm_bf16 twice"),
        (["nothing-like-it"], "there is no model"),
        (["/dev/zero"], "too large for a config.json"),
        ([""], "no model was named"),
        (["Tiny2"], "did you mean tiny?"),
        (["./no-such-folder"], "no such file or folder"),
        (["tiny", "--seed", "x"], "--seed=x is not a whole number"),
        (["tiny", "--output", "/dev/null/x"], "name a file"),
    ],
)
def test_bad_input_is_one_line_and_a_hint(capsys, words, said):
    assert said in refused(capsys, *words)


@pytest.mark.parametrize(("version", "collide"), [("0.6.15.post1", False), ("0.5", True), ("0.6.12", True)])
def test_a_flashinfer_that_the_ranks_would_refuse_is_refused_by_the_plan(capsys, version, collide):
    assert main(["plan", "tiny", "--flashinfer-version", version]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: FlashInfer {version} is refused: it has no process group for the autotuner")
    assert ("keys collide" in error) is collide
    assert hint == "hint: use 0.6.16 or newer in versions.json"


def test_all_that_is_wrong_is_said_at_once(capsys):
    said = refused(capsys, "no-such-model", "--tp", "three", "--buckets", "0,y", "--seed", "z")
    for part in ("TP=three", "--buckets=0", "--buckets=y", "--seed=z", "no-such-model", "5 settings"):
        assert part in said


def test_wrong_options_beside_a_good_model_are_said_at_once(capsys):
    said = refused(
        capsys, "tiny", "--arch", "90a", "--tp", "x", "--ops", "qvk", "--skip-ops", "y", "--backends", "mm_bf16=cudnn"
    )
    for part in ("TP=x", "--ops qvk", "--skip-ops y", "mm_bf16=cudnn", "4 settings"):
        assert part in said


@pytest.mark.parametrize("change", [{"head_dim": "x"}, {"quantization_config": "x"}, {"num_key_value_heads": 5}])
def test_a_wrong_value_in_a_config_has_a_hint_as_well(capsys, tmp_path, change):
    bundled = json.loads((ROOT / "pipeline" / "models" / "Qwen3-8B.json").read_text())["config"]
    (tmp_path / "config.json").write_text(json.dumps({**bundled, **change}))
    assert main(["plan", str(tmp_path), "--arch", "90a"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: config.json: ") and hint.startswith("hint: mend that in the model's config.json")


def test_broken_config_has_line_and_column(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{\n "a": }')
    assert "config.json:2:7: not JSON" in refused(capsys, str(tmp_path))


# --- the hub


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub as one config.json needs."""

    config = json.dumps(dict(find_model("tiny").config)).encode()

    def do_HEAD(self):
        if not self.path.startswith("/someone/tiny-copy/resolve/"):
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("ETag", '"abc"')
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("Content-Length", str(len(self.config)))
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        if self.path.startswith("/someone/tiny-copy/"):
            self.wfile.write(self.config)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def plan_process(model, home, **environment):
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return subprocess.run(
        [sys.executable, "-m", "pipeline", "plan", model, *FIXED, "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env={**kept, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment},
    )  # fmt: skip


def test_hub_id_is_fetched_once_and_then_found_without_the_hub(hub, tmp_path):
    online = plan_process("someone/tiny-copy", tmp_path, HF_ENDPOINT=hub)
    assert online.returncode == 0, online.stderr
    value = json.loads(online.stdout)
    assert value["model"] == "tiny-copy"
    assert any("only config.json was read" in note for note in value["notes"])
    closed = "http://127.0.0.1:9"
    offline = plan_process("someone/tiny-copy", tmp_path, HF_ENDPOINT=closed)
    assert json.loads(offline.stdout) == value
    missing = plan_process("meta-llama/Llama-3.1-8B-Instruct", tmp_path, HF_ENDPOINT=closed)
    assert missing.returncode == 2
    assert "hub cannot be reached" in missing.stderr
    assert "did you mean Llama-3.1-8B?" in missing.stderr
    assert "Traceback" not in missing.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_ENDPOINT", "http://localhost:99999"),
        ("HF_ENDPOINT", "http://[::1"),  # these two fail in the client's own import
        ("HF_HUB_DOWNLOAD_TIMEOUT", "soon"),
    ],
)
def test_settings_that_the_hub_s_client_does_not_take_are_said(tmp_path, name, value):
    done = plan_process("someone/else", tmp_path, **{"HF_TOKEN": "hf_secret", name: value})
    assert done.returncode == 2, done.stderr
    error, hint = done.stderr.splitlines()
    assert f"{name}={value!r}" in error and "hf_secret" not in done.stderr
    assert "a path to a config.json" in hint


def test_hub_without_the_model(hub, tmp_path):
    done = plan_process("someone/else", tmp_path, HF_ENDPOINT=hub)
    assert done.returncode == 2
    assert "no model someone/else" in done.stderr
    assert "Traceback" not in done.stderr
