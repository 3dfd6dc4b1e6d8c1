"""`pipeline plan` as a person types it: output, bad input, exit codes."""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.contract.plan import Plan
from pipeline.planning.model_source import find_model

ROOT = Path(__file__).resolve().parents[2]
FIXED = ("--flashinfer-version", "0.6.16.post3")


def refused(capsys, *words):
    assert main(["plan", *words, *FIXED]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err and "hint: " in captured.err
    return captured.err


def planned(capsys, *words):
    assert main(["plan", *words, *FIXED, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_table_and_json_are_the_same_plan(capsys, tmp_path):
    out = tmp_path / "deep" / "plan.json"
    assert main(["plan", "tiny", "--tp", "2", *FIXED, "--output", str(out)]) == 0
    table = capsys.readouterr().out
    plan = Plan.from_json(planned(capsys, "tiny", "--tp", "2"))
    assert plan.digest in table and Plan.from_json(json.loads(out.read_text())) == plan
    assert (plan.layout.tp, plan.device) == (2, "cpu")


def test_version_comes_from_versions_json(capsys):
    from pipeline.versions import load

    assert main(["plan", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flashinfer_version"] == load(ROOT)["FLASHINFER_VERSION"]


def test_empty_options_count_as_not_given(capsys):
    names = ("tp", "ep", "device", "arch", "max-tokens", "buckets", "ops", "seed", "backends")
    assert planned(capsys, "tiny", *(w for n in names for w in (f"--{n}", ""))) == planned(capsys, "tiny")


def test_ranges_of_buckets_are_plain_numbers_in_the_plan(capsys):
    ranges = planned(capsys, "tiny", "--buckets", "64,1,8-32:8,8")
    assert {tuple(op["buckets"]) for op in ranges["ops"]} == {(1, 8, 16, 24, 32, 64)}
    assert planned(capsys, "tiny", "--buckets", "1,8,16,24,32,64") == ranges


@pytest.mark.parametrize(("spelled", "arch"), [("9.0", "90a"), ("h200", "90a"), ("B200", "100a"), ("rtx-5090", "120f")])
def test_a_gpu_is_named_by_architecture_or_name(capsys, spelled, arch):
    value = planned(capsys, "tiny", "--arch", spelled)
    assert (value["device"], value["arch"]) == ("cuda", arch)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((["tiny", "--tp", n], f"--tp {n}: expected an integer from 1 to 1024") for n in ("0", "-1", "x", "٣", "1025")),
        (["tiny", "--tp", "3"], "TP=3 does not divide 4 attention heads"),
        (["tiny", "--ep", "2"], "tiny has no experts"),
        (["tiny-moe", "--tp", "1", "--ep", "2"], "EP=2 does not divide the 1 ranks"),
        (["tiny", "--pp", "3"], "PP=3 is more than 2 layers"),
        (["tiny", "--tp", "2", "--dp", "1024"], "TP, PP and DP make 2048 ranks"),
        (["DeepSeek-V3", "--tp", "32", "--arch", "90a"], "gate_up 576 channels per rank, not whole"),
        (["tiny", "--device", "tpu"], "neither cpu nor cuda"),
        (["tiny", "--device", "cuda"], "--device cuda needs --arch"),
        (["tiny", "--device", "cpu", "--arch", "90a"], "not a processor"),
        (["tiny", "--arch", "hh200"], "did you mean h200 (90a)? known: 80: a100"),
        (["tiny", "--buckets", "1,2,x"], "--buckets=x is neither a count nor a range"),
        (["tiny", "--buckets", "8-16"], "--buckets=8-16 is neither a count nor a range with a step"),
        (["tiny", "--buckets", "1,256", "--max-tokens", "64"], "bucket 256 is above --max-tokens=64"),
        (["tiny", "--max-tokens", "1e3"], "--max-tokens 1e3: expected an integer"),
        (["tiny", "--ops", "qvk"], "did you mean qkv?"),
        (["tiny", "--skip-ops", "bf16gemm"], "did you mean bf16_gemm?"),
        (["tiny", "--arch", "90a", "--backends", "mm_bf16"], "names no backend"),
        (["tiny", "--arch", "90a", "--backends", "mm_bf16=tgv"], "does not exist on 90a"),
        (["tiny", "--arch", "90a", "--backends", "mm_bf16=cublaslt,mm_bf16=tinygemm"], "names mm_bf16 twice"),
        (["nothing-like-it"], "there is no model"),
        (["/dev/zero"], "too large for a config.json"),
        ([""], "no model was named"),
        (["Tiny2"], "did you mean tiny?"),
        (["./no-such-folder"], "no such file or folder"),
        (["tiny", "--seed", "x"], "--seed x: expected an integer from 0"),
        (["tiny", "--output", "/dev/null/x"], "name a file you may write"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_a_hint(capsys, words, said):
    assert said in refused(capsys, *words)


@pytest.mark.parametrize(("version", "collide"), [("0.6.15.post1", False), ("0.5", True), ("0.6.16rc1", False)])
def test_a_flashinfer_that_the_ranks_would_refuse_is_refused_by_the_plan(capsys, version, collide):
    assert main(["plan", "tiny", "--flashinfer-version", version]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: FlashInfer {version} is refused: it has no process group for the autotuner")
    assert ("keys collide" in error) is collide
    assert hint == "hint: use FlashInfer 0.6.16 or newer"


def test_all_that_is_wrong_is_said_at_once(capsys):
    said = refused(capsys, "no-such-model", "--tp", "three", "--buckets", "0,y", "--seed", "z")
    for part in ("--tp three", "--buckets=0", "--buckets=y", "--seed z", "no-such-model", "5 invalid settings"):
        assert part in said
    words = ("--tp", "x", "--ops", "qvk", "--skip-ops", "y", "--backends", "mm_bf16=cudnn")
    said = refused(capsys, "tiny", "--arch", "90a", *words)
    for part in ("--tp x", "--ops qvk", "--skip-ops y", "mm_bf16=cudnn", "4 invalid settings"):
        assert part in said


def test_a_folder_with_a_bundled_name_is_mentioned(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-8B").mkdir()
    assert planned(capsys, "Qwen3-8B", "--arch", "h200")["ops"][0]["layers"] == 36  # an empty folder is no model
    config = {**find_model("Qwen3-8B").config, "num_hidden_layers": 3}
    (tmp_path / "Qwen3-8B" / "config.json").write_text(json.dumps(config))
    bundled = planned(capsys, "Qwen3-8B", "--arch", "h200")
    assert bundled["ops"][0]["layers"] == 36
    assert any("bundled Qwen3-8B, not the folder Qwen3-8B here: write ./Qwen3-8B" in note for note in bundled["notes"])
    local = planned(capsys, "./Qwen3-8B", "--arch", "h200")
    assert local["ops"][0]["layers"] == 3 and not any("bundled" in note for note in local["notes"])


@pytest.mark.parametrize("change", [{"head_dim": "x"}, {"quantization_config": "x"}, {"num_key_value_heads": 5}])
def test_a_wrong_value_in_a_config_has_a_hint_as_well(capsys, tmp_path, change):
    (tmp_path / "config.json").write_text(json.dumps({**find_model("Qwen3-8B").config, **change}))
    error, hint = refused(capsys, str(tmp_path), "--arch", "90a").splitlines()
    assert error.startswith("error: config.json: ") and hint.startswith("hint: fix that in the model's config.json")


# --- the hub


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub as one config.json needs."""

    config = json.dumps(dict(find_model("tiny").config)).encode()

    def do_HEAD(self):
        known = self.path.startswith("/someone/tiny-copy/resolve/")
        self.send_response(200 if known else 404)
        headers = {"ETag": '"abc"', "X-Repo-Commit": "1" * 40} if known else {"X-Error-Code": "RepoNotFound"}
        for name, value in {**headers, "Content-Length": str(len(self.config) if known else 0)}.items():
            self.send_header(name, value)
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
    assert json.loads(plan_process("someone/tiny-copy", tmp_path, HF_ENDPOINT=closed).stdout) == value
    missing = plan_process("meta-llama/Llama-3.1-8B-Instruct", tmp_path, HF_ENDPOINT=closed)
    assert missing.returncode == 2 and "Traceback" not in missing.stderr
    assert "hub cannot be reached" in missing.stderr and "did you mean Llama-3.1-8B?" in missing.stderr
    unknown = plan_process("someone/else", tmp_path, HF_ENDPOINT=hub)
    assert unknown.returncode == 2 and "no model someone/else" in unknown.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [("HF_ENDPOINT", "http://localhost:99999"), ("HF_ENDPOINT", "http://[::1"), ("HF_HUB_DOWNLOAD_TIMEOUT", "soon")],
)
def test_settings_that_the_hub_s_client_does_not_take_are_said(tmp_path, name, value):
    secrets = {"HF_TOKEN": "hf_secret", "HF_HUB_PROXY_PASSWORD": "hf_secret"}
    done = plan_process("someone/else", tmp_path, **secrets, **{name: value})
    assert done.returncode == 2, done.stderr
    error, hint = done.stderr.splitlines()
    assert name in error and "hf_secret" not in done.stderr
    assert "a path to a config.json" in hint


@pytest.mark.parametrize("proxy", ["http://u:hunter2@localhost:9", "http://u:hunter2@[::1", "http://u:hunter2@h:x"])
def test_a_proxy_that_cannot_be_used_is_named_at_once(tmp_path, proxy):
    began = time.monotonic()
    done = plan_process("someone/else", tmp_path, HTTPS_PROXY=proxy)
    assert done.returncode == 2 and time.monotonic() - began < 20
    assert "HTTPS_PROXY" in done.stderr and "hint: " in done.stderr
    assert "hunter2" not in done.stderr and "Traceback" not in done.stderr
