"""A stand-in for an inference engine's serve command: it writes tuned tactics where and how the real one does.

Installed in a test's base image as `vllm` and as the module `sglang.launch_server`. It is none of ours: paths, hashes and
rules are written again here from what the engines' packages say, and nothing is imported from the pipeline. The record
comes from the FlashInfer in the image; tactics are random, so that a start that tunes again shows.
"""

import argparse
import hashlib
import http.server
import json
import os
import random
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

OUTSIDE = {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", "VLLM_CACHE_ROOT", "VLLM_LOGGING_LEVEL", "VLLM_HOST_IP", "VLLM_PORT"}


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as stream:
        json.dump(value, stream, indent=2, sort_keys=True)
    Path(name).replace(path)


def metadata():
    if os.environ.get("STAND_IN_RECORD"):
        return json.loads(Path(os.environ["STAND_IN_RECORD"]).read_text())
    from flashinfer.autotuner.autotuner import _collect_metadata

    return dict(_collect_metadata())


def tune(known, rank):
    """Entries for three shapes, as they are known or else by chance; how many were tuned."""
    made = dict(known)
    keys = [str(("stand_in_gemm", "StandInRunner", ((n, 64), (64, 128)), ())) for n in (1, 8, 64)]
    missing = [key for key in keys if key not in made]
    for key in missing:
        made[key] = ["StandInRunner", [random.randrange(10**9), len(key)]]
    return made, len(missing)


def load(path, record):
    if not path.is_file():
        return {}
    value = json.loads(path.read_text())
    return {k: v for k, v in value.items() if not k.startswith("_")} if value.pop("_metadata") == record else {}


def configuration(words, config):
    """What enters the hash of the configuration: the model's spelling, its config, sizes."""
    return [words.model, words.tp, words.max_model_len, config]


def vllm_028(words, config, record):
    seen = {n: v for n, v in os.environ.items() if n.startswith("VLLM_") and n not in OUTSIDE}
    digest = sha(str([sha(json.dumps(seen, sort_keys=True)), sha(json.dumps(configuration(words, config)))]))
    path = Path(os.environ["VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"]) / digest / "autotune_configs.json"
    made, tuned = tune(load(path, record), 0)
    for _ in range(words.tp):  # every rank rewrites it
        write(path, {"_metadata": record, **made})
    return len(made), tuned


def vllm_033(words, config, record):
    root = Path(os.environ["VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"])
    if words.tp == 1:
        manifest = {**record, "cache_schema": "v2"}
        digest = sha(json.dumps(manifest, sort_keys=True, separators=(",", ":")))
        place = root / "v2" / digest[:16]
        known = [json.loads(path.read_text()) for path in place.glob("entries/*.json")]
        made, tuned = tune({one["key"]: [one["runner"], one["tactic"]] for one in known}, 0)
        write(place / "manifest.json", manifest)
        for key, (runner, tactic) in list(made.items())[len(made) - tuned :]:
            write(place / "entries" / f"{sha(key)[:24]}.json", {"key": key, "runner": runner, "tactic": tactic})
        return len(made), tuned
    digest = sha(sha(json.dumps(configuration(words, config))))
    paths = [root / digest / f"autotune_configs_dp0_rank{rank}.json" for rank in range(words.tp)]
    known = [load(path, record) for path in paths]
    if all(known) and len({len(one) for one in known}) == 1:
        return len(known[0]), 0
    made, tuned = tune({}, 0)
    for rank, path in enumerate(paths):
        if words.stand_in == "disagree" and rank:
            made = {key: ["StandInRunner", [rank, 0]] for key in made}
        if words.stand_in == "other-record":
            record = {**record, "cuda_version": "99.9"}
        if words.stand_in == "two-caches":
            write(root / sha("draft") / path.name, {"_metadata": record, **made})
        if words.stand_in != "one-rank" or not rank:
            write(path, {"_metadata": record, **made})
    return len(made), tuned


def sglang(words, config, record):
    digest = sha(
        "|".join([words.model, "float32", "None", "auto", str(words.tp), "1", "1", "1", config["architectures"][0]])
    )
    folder = (
        Path(os.environ["SGLANG_CACHE_DIR"])
        / "flashinfer/autotune"
        / version("flashinfer-python")
        / "sm90"
        / digest[:16]
    )
    paths = [folder / f"rank_tp{rank}_pp0_dp0.json" for rank in range(words.tp)]
    known = [load(path, record) for path in paths]
    made, tuned = tune(known[0] if all(one == known[0] for one in known) else {}, 0)
    for path in paths:  # each start saves
        write(path, {"_metadata": record, **made})
    return len(made), tuned


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


def main(engine):
    parser = argparse.ArgumentParser(prog=engine)
    parser.add_argument("positional", nargs="*")
    parser.add_argument("--model", "--model-path", default="")
    parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", "-tp", dest="tp", type=int, default=1)
    parser.add_argument("--max-model-len", default="")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    parser.add_argument("--stand-in", default="")
    words = parser.parse_args(sys.argv[2:] if engine == "vllm" else sys.argv[1:])
    words.model = (words.positional or [words.model])[0]
    config = json.loads((Path(words.model) / "config.json").read_text())
    if words.stand_in == "die":
        sys.exit("stand-in: out of memory, as if a kernel had none")
    print("stand-in: starting", flush=True)
    if words.stand_in == "hang":
        time.sleep(3600)
    shape = sglang if engine == "sglang" else vllm_028 if version("vllm").startswith("0.28") else vllm_033
    if words.stand_in != "tunes-nothing":
        held, tuned = shape(words, config, metadata())
        print(f"stand-in: {held} entries, {tuned} tuned at this start, load format {words.load_format}", flush=True)
    if not os.environ.get("STAND_IN_ONCE"):  # else it ends when it would answer
        http.server.HTTPServer((words.host, words.port), Health).serve_forever()


if __name__ == "__main__":
    main("vllm" if Path(sys.argv[0]).name == "vllm" else "sglang")
