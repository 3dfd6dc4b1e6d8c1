#!/bin/bash
# The present tuner on one GPU, in about five minutes. Installs nothing, needs no network.
#
#   one_gpu.sh SOURCE OUT            tunes Llama-3.1-8B, bf16 and fp8 (84 entries each), twice each, replays all four
#   PART=speed one_gpu.sh SOURCE OUT the bare script and the tuner without comparing, in turn, three times each
#   PART=hang one_gpu.sh SOURCE OUT  two small products; a kernel that never ends, while FlashInfer measures and while
#                                     tactics are compared: it must be named, left out, and the rest tuned (about 3 minutes)
#
# SOURCE is a source tree, OUT a folder (OUT/summary.json and OUT/summary.txt are the result, OUT/*.log what was said).
# Needs python3 (PYTHON) that imports torch and FlashInfer, ninja and nvcc on PATH or below CUDA_HOME.
# LIMIT: seconds for everything (290). DEVICE=cpu: the same with two small products on a CPU, to try the script.
set -uo pipefail
SOURCE=$(cd "${1:?SOURCE}" && pwd) || exit 2
mkdir -p "${2:?OUT}" && OUT=$(cd "$2" && pwd) || exit 2
PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-290} DEVICE=${DEVICE:-cuda} PART=${PART:-tunes} BEGAN=$SECONDS
WORK=$(mktemp -d /tmp/one_gpu.XXXXXX)
trap 'rm -rf "$WORK"' EXIT
export PYTHONPATH="$SOURCE${PYTHONPATH:+:$PYTHONPATH}"
export FLASHINFER_WORKSPACE_BASE="${FLASHINFER_WORKSPACE_BASE:-$WORK/workspace}" GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 TQDM_DISABLE=1
export FLASHINFER_LOGGING_LEVEL=warning PIPELINE_AUTOTUNE_CACHE_DIR=
[ -d /usr/local/cuda/bin ] && export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}" PATH="$PATH:/usr/local/cuda/bin"
mkdir -p "$FLASHINFER_WORKSPACE_BASE"; cd "$SOURCE" || exit 2
: > "$OUT/steps.tsv"

# step NAME SECONDS COMMAND…: run it for so long at most, and not beyond LIMIT; stdout to OUT/NAME.out, stderr to OUT/NAME.log
step() {
    local name=$1 most=$2 left=$((LIMIT - (SECONDS - BEGAN))) began status; shift 2
    [ "$left" -lt "$most" ] && most=$left
    [ "$most" -lt 3 ] && { printf '%s\tskipped\t0\n' "$name" >> "$OUT/steps.tsv"; echo "$name: no time left"; return 1; }
    began=$(date +%s.%N)
    timeout -k 5 "$most" "$@" > "$OUT/$name.out" 2> "$OUT/$name.log"; status=$?
    printf '%s\t%s\t%s\n' "$name" "$status" "$(echo "$(date +%s.%N) $began" | awk '{printf "%.2f", $1 - $2}')" | tee -a "$OUT/steps.tsv"
    [ "$status" = 0 ] || tail -n 15 "$OUT/$name.log"
    return $status
}

step host 30 bash -c 'nvidia-smi --query-gpu=name,driver_version,memory.used,utilization.gpu,clocks.sm,power.draw --format=csv; nproc; uptime; command -v ninja nvcc; exit 0'
step plan 60 "$PYTHON" - "$WORK" "$DEVICE" "$PART" <<'PY' || { cat "$OUT/plan.log"; exit 1; }
import json, platform, sys
from pathlib import Path
from flashinfer.version import __version__ as version
from pipeline.contract.plan import Layout, OpPlan, Plan
work, device = Path(sys.argv[1]), sys.argv[2]
def dtypes(one, out): return {"a": one, "b": one, "out": out}
if device == "cuda":
    buckets = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 8192)
    shapes, arch = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}, "90a"
    kinds = {"bf16": ("mm_bf16", ("cublaslt",), dtypes("bfloat16", "bfloat16")),
             "fp8": ("bmm_fp8", ("cublas",), dtypes("float8_e4m3fn", "bfloat16"))}
else:
    buckets, shapes, arch = (1, 8, 32), {"wide": (192, 64), "narrow": (64, 96)}, f"cpu-{platform.machine()}"
    kinds = {"bf16": ("cpu_mm", (), dtypes("bfloat16", "bfloat16")), "fp8": ("cpu_mm", (), dtypes("float32", "float32"))}
if sys.argv[3] == "hang":
    kinds, buckets = {"bf16": kinds["bf16"]} if device == "cuda" else {"bf16": kinds["fp8"]}, (1, 16, 64) if device == "cuda" else buckets
    shapes = {"small": (1024, 512), "other": (2048, 512)} if device == "cuda" else shapes
for name, (op, backends, kind) in kinds.items():
    ops = tuple(OpPlan(product, op, {"n": n, "k": k}, kind, buckets, backends, layers=32) for product, (n, k) in shapes.items())
    plan = Plan("Llama-3.1-8B", device, arch, version, Layout(), ops)
    (work / f"{name}.json").write_text(json.dumps(plan.to_json()))
    print(name, sum(len(one.buckets) for one in ops), "entries", plan.digest)
PY
tuner() { echo "$PYTHON" -m pipeline.tune "$WORK/$1.json" "$WORK/$2" --timeout 60; }

if [ "$PART" = speed ]; then
    for kind in bf16 fp8; do
        step "compile-$kind" 150 $(tuner $kind "compile-$kind") --compare off
        for turn in 1 2 3; do
            step "bare-$kind-$turn" 60 "$PYTHON" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=1 \
                "$SOURCE/bench/bare_tune.py" "$WORK/$kind.json" "$WORK/bare-$kind-$turn.json"
            step "off-$kind-$turn" 60 $(tuner $kind "off-$kind-$turn") --compare off
        done
    done
elif [ "$PART" = hang ]; then
    faults="hanging_on_a_gpu hanging_in_rounds_on_a_gpu hanging_in_workers_on_a_gpu"; [ "$DEVICE" = cpu ] && faults=hanging_tactic
    step compile 150 $(tuner bf16 compile) --compare off
    for fault in $faults; do
        step "$fault" 150 env PIPELINE_TUNE_TEST_HOOKS="$SOURCE/tests/tune/faults.py" PIPELINE_TEST_FAULT=$fault PIPELINE_TEST_RANK='*' \
            "$PYTHON" -m pipeline.tune "$WORK/bf16.json" "$WORK/$fault" --timeout 12
        step "replay-$fault" 45 "$PYTHON" -m pipeline.tune.replay --root "$WORK/$fault" --timeout 40
        mkdir -p "$OUT/caches/$fault" && cp -r "$WORK/$fault/." "$OUT/caches/$fault" 2>/dev/null
        tail -n 12 "$OUT/$fault.log"
    done
else
    for kind in bf16 fp8; do
        # The first also compiles FlashInfer's module (phase jit)
        step "tune-$kind-1" 150 $(tuner $kind "$kind-1")
        step "tune-$kind-2" 90 $(tuner $kind "$kind-2")
        for turn in 1 2; do
            step "replay-$kind-$turn" 45 "$PYTHON" -m pipeline.tune.replay --root "$WORK/$kind-$turn" --timeout 40
            mkdir -p "$OUT/caches/$kind-$turn" && cp -r "$WORK/$kind-$turn/." "$OUT/caches/$kind-$turn" 2>/dev/null
        done
    done
    # An independent look, in a process that took no part: each choice beside the default at its bucket
    [ "$DEVICE" = cuda ] && for kind in bf16 fp8; do
        step "measure-$kind" 60 "$PYTHON" -m tests.gpu.measure_cache "$WORK/$kind-1" "$OUT/measure-$kind.json" --rounds 12
    done
fi
step host-after 20 bash -c 'nvidia-smi --query-gpu=name,memory.used,utilization.gpu,clocks.sm,power.draw --format=csv; uptime; exit 0'

"$PYTHON" -S - "$OUT" "$PART" <<'PY' | tee "$OUT/summary.txt"
import json, math, statistics, sys
from pathlib import Path
out, part, found = Path(sys.argv[1]), sys.argv[2], {}
steps = {n: (s, float(t)) for n, s, t in (line.split("\t") for line in (out / "steps.tsv").read_text().splitlines())}
def told(name):
    try: return json.loads((out / f"{name}.out").read_text().strip().splitlines()[-1])
    except (OSError, ValueError, IndexError): return {}
def geometric(values): return round(math.exp(statistics.fmean(map(math.log, values))), 5) if values else None
def rows(name):
    paths = list((out / "caches" / name).glob("*/*/*/manifest.json"))
    return json.loads(paths[0].read_text())["covered"] if len(paths) == 1 else []
bad = {n: s for n, (s, _) in steps.items() if s != "0"}
found["steps that did not end well"] = bad
for fault in ("hanging_on_a_gpu", "hanging_in_rounds_on_a_gpu", "hanging_in_workers_on_a_gpu", "hanging_tactic") if part == "hang" else ():
    if f"{fault}" in steps:
        paths = list((out / "caches" / fault).glob("*/*/*/manifest.json"))
        blocked = json.loads(paths[0].read_text())["blocked"] if paths else None
        found[fault] = {"ended": steps[fault], "blocked": blocked, "replay": told(f"replay-{fault}").get("hits"), "of": told(f"replay-{fault}").get("calls")}
for kind in ("bf16", "fp8") if part != "hang" else ():
    one = found[kind] = {}
    if part == "speed":
        for what in ("bare", "off"):
            one[what] = [steps[f"{what}-{kind}-{t}"][1] for t in (1, 2, 3) if steps.get(f"{what}-{kind}-{t}", ("", 0))[0] == "0"]
        pairs = [b / a for a, b in zip(one["bare"], one["off"])]
        one["off / bare, paired"] = [round(p, 3) for p in pairs]
        one["median"] = round(statistics.median(pairs), 3) if pairs else None
        continue
    for turn in (1, 2):
        name = f"{kind}-{turn}"
        t, r, covered = told(f"tune-{name}"), told(f"replay-{name}"), rows(name)
        ratios = [row["ratio"] for row in covered if row["ratio"] is not None]
        left = [row for row in covered if row["tactic"] != -1]
        one[f"tune {turn}"] = {
            "wall seconds": steps.get(f"tune-{name}", ("", None))[1], "inside the tuner": t.get("seconds"), "phases": t.get("phases"),
            "entries": t.get("entries"), "notes": t.get("notes"),
            "decided by": {d: sum(row["decided_by"] == d for row in covered) for d in ("default", "faster", "tie", "argmin")},
            "left the default": len(left),
            "gain over the default (its own times, all counts and states)": geometric([1 / x for x in ratios]),
            "gain at the bucket": geometric([row["default_ms"] / row["time_ms"] for row in covered if row["default_ms"] and row["time_ms"]]),
            "largest ratio of a choice": max(ratios, default=None), "best ratio": min(ratios, default=None),
            "replay": {n: r.get(n) for n in ("calls", "hits", "other_calls", "other_hits", "measured", "seconds")}
                      | {"misses": len(r.get("misses", ())), "wrong": len(r.get("wrong", ()))} if r else None,
        }
    a, b = ({(row["op"], row["bucket"]): (row["runner"], json.dumps(row["tactic"])) for row in rows(f"{kind}-{t}")} for t in (1, 2))
    if a and b:
        differ = sorted(k for k in a if a[k] != b.get(k))
        one["two tunes agree"] = f"{len(a) - len(differ)} of {len(a)} ({(len(a) - len(differ)) / len(a):.1%})"
        one["entries that differ"] = [[*k, a[k], b.get(k)] for k in differ]
    path = out / f"measure-{kind}.json"
    if path.exists():
        seen = [row for row in json.loads(path.read_text())["rows"] if "ratio" in row]
        own = [row["ratio"] for row in seen if row["tactic"] != -1]
        noise = [row["ratio"] for row in seen if row["tactic"] == -1]
        one["measured by another process (tune 1)"] = {
            "gain over the default, all entries": geometric([1 / row["ratio"] for row in seen if row["tactic"] != -1] + [1.0] * len(noise)),
            "entries that left the default": len(own), "worst ratio of them": max(own, default=None), "best": min(own, default=None),
            "more than 1 % slower": sum(x > 1.01 for x in own), "the default beside itself": [min(noise, default=None), max(noise, default=None)],
        }
(out / "summary.json").write_text(json.dumps(found, indent=1))
print(json.dumps(found, indent=1))
for name, (status, seconds) in steps.items(): print(f"{name:24} {status:>8} {seconds:8.2f} s")
PY
echo "in all $((SECONDS - BEGAN)) s"
