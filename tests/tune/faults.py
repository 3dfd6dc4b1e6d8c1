"""Faults for tests, planted through the places that the tuner offers (`pipeline.tune.hooks`).

The tuner runs this file as PIPELINE_TUNE_TEST_HOOKS. PIPELINE_TEST_FAULT names a function below, which returns what to
plant; it is planted in the rank PIPELINE_TEST_RANK (`*`: in each) and in the processes beside it.
"""

import ctypes
import dataclasses
import errno
import os
import pathlib
import re
import signal
import sys
import time

FAULT, RANK = os.environ.get("PIPELINE_TEST_FAULT", ""), os.environ.get("RANK", "")
IS_WORKER = "--multiprocessing-fork" in sys.orig_argv  # a process beside a rank
LONG = 600  # seconds: longer than any timeout of a test


def kill(number=signal.SIGKILL):
    os.kill(os.getpid(), number)


def hang():
    """Be in a native call that never returns, and keep the interpreter to itself."""
    while True:
        ctypes.PyDLL(None).pause()


def fail(error):
    raise error


def exhaust(*_):
    import torch

    raise torch.cuda.OutOfMemoryError("planted exhaustion")


def on_call(number, action):
    """A function that acts in its n-th call alone."""
    count = [0]

    def call(*_):
        count[0] += 1
        if count[0] == number:
            action()

    return call


# ── ranks that end, stop or crawl ──


def killed():
    return {"before_tactic": on_call(5, kill)}


def told_to_end():
    return {"before_tactic": on_call(5, lambda: kill(signal.SIGTERM))}


def stopped():
    return {"before_tactic": on_call(5, lambda: kill(signal.SIGSTOP))}


def stopped_while_importing():
    return {"importing": lambda: kill(signal.SIGSTOP)}


def too_slow():
    return {"before_tactic": on_call(5, lambda: time.sleep(LONG))}


def too_slow_everywhere():
    return {"before_tactic": lambda *_: time.sleep(LONG)}


def slow():
    return {"before_tactic": lambda *_: time.sleep(0.05)}


def slow_and_noted():
    """Each call takes long, and each measurement is written down."""
    place = pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / "noted"
    place.unlink(missing_ok=True)

    def note(inputs, tactic):
        with place.open("a") as stream:
            stream.write(f"{len(inputs[0])} {tactic}\n")

    return {"cpu_mm": lambda *_: time.sleep(0.05), "before_tactic": note}


def slow_preparation():
    return {"preparing": on_call(2, lambda: time.sleep(LONG))}


def stuck_in_narrow():
    return {"before_tactic": lambda inputs, tactic: inputs[1].shape == (64, 96) and time.sleep(LONG)}


def killed_when_all_is_done():
    return {"done": kill}


# ── memory, disks ──


def out_of_memory_in_preparation():
    return {"preparing": exhaust}


def out_of_memory_in_drawing():
    return {"drawing_inputs": on_call(2, exhaust)}


def out_of_memory_in_copying():
    return {"copying_inputs": on_call(2, exhaust)}


def out_of_memory_in_a_tactic():
    return {"before_tactic": on_call(5, exhaust)}


def out_of_memory_in_collecting():
    """What comparing asks of an op at a token count beside the bucket has no room."""
    return {"looking_up": lambda tuner: tuner.watch.questions is not None and fail(MemoryError("planted"))}


def no_room_to_keep():
    return {"before_save": lambda: fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))}


# ── ranks that differ ──


def each_field_differs(when):
    """This rank says something else for every field of a contract."""
    return {"contract": lambda said, now: dict.fromkeys(said, "another") if now == when else None}


def each_field_differs_before_tuning():
    return each_field_differs("before tuning")


def each_field_differs_before_wide():
    return each_field_differs("before wide")


def other_seed():
    return {"plan": lambda plan: dataclasses.replace(plan, seed=plan.seed + 1)}


def other_environment():
    os.environ["FLASHINFER_AUTOTUNE_PLANTED"] = "1"


def other_tactic():
    return {
        "entries": lambda held: {
            **held, min(held): dataclasses.replace(held[min(held)], tactic=["blas", "nk", 0, 0, 99])
        }
    }  # fmt: skip


def steady_clock():
    """Every rank measures the same times."""
    return {"measured": lambda time_ms, tactic: 1 + sum(map(ord, str(tactic))) / 1000}


# ── tactics ──


def all_tactics_fail():
    return {"before_tactic": lambda *_: fail(RuntimeError("planted failure"))}


def default_wins():
    return {"cpu_mm": lambda tactic, *_: tactic != -1 and time.sleep(0.002)}


def wrong_and_fast():
    def call(tactic, a, b, out):
        if tactic != -1 and tactic[0] == "upcast":
            out.zero_()
        else:
            time.sleep(0.0005)

    return {"cpu_mm": call}


def bad(tactic, a, out, *, tokens=8, shape=192):
    """Whether this is one of two tactics at one bucket of one op."""
    return tactic != -1 and tuple(tactic[:2]) == ("blas", "nk") and out.shape == (tokens, shape)


def crashing_tactic():
    return {"cpu_mm": lambda tactic, a, b, out: bad(tactic, a, out) and kill(signal.SIGSEGV)}


def crashing_default():
    return {"cpu_mm": lambda tactic, *_: tactic == -1 and kill(signal.SIGSEGV)}


def crashing_in_verifying():
    """The tactics that are fastest crash, but not where they are measured."""
    return {
        "cpu_mm": lambda tactic, a, b, out: (
            tactic != -1 and tactic[0] == "upcast" and out.shape == (24, 64) and os._exit(3)
        ),
        "measured": lambda time_ms, tactic: 0.1 if tactic[0] == "upcast" else 1.0,
    }


def device_lost():
    """A tactic fails and leaves no GPU behind."""
    return {
        "cpu_mm": lambda tactic, a, b, out: bad(tactic, a, out) and fail(RuntimeError("planted illegal access")),
        "context_lost": lambda _: "AcceleratorError: planted",
    }


def hanging_tactic():
    return {"cpu_mm": lambda tactic, a, b, out: tactic == ("blas", "nk", 0, 0, 1) and bad(tactic, a, out) and hang()}


def hanging_default():
    return {"cpu_mm": lambda tactic, *_: tactic == -1 and hang()}


ONE = ("upcast", "nk", 0, 0, 1)
ONE_IS_FAST = {"measured": lambda time_ms, tactic: 0.1 if tactic == ONE else 1.0}


def hanging_in_comparing(after=0):
    """The one tactic that is fast hangs on rank 1, but not where it is measured."""
    seen = [0]

    def call(inputs, tactic):
        if len(inputs[0]) == 16 and tactic == ONE:
            seen[0] += 1
            if RANK == "1" and seen[0] > after:
                hang()

    return {"timed_call": call, **ONE_IS_FAST}


def hanging_in_rounds():
    """As above, but only in rounds: it has come back where its bench is made."""
    return hanging_in_comparing(after=1)


def hanging_twice():
    """A tactic of one op where it is measured, and the one that is chosen for another where it is verified."""

    def call(tactic, a, b, out):
        if (tactic == ("blas", "nk", 0, 0, 1) and bad(tactic, a, out)) or (tactic == ONE and out.shape == (24, 64)):
            hang()

    return {"cpu_mm": call, **ONE_IS_FAST}


# ── comparing ──


def no_memory_to_compare():
    return {"make_bench": lambda bucket: fail(MemoryError("planted"))}


def worker_dies():
    """A process beside a rank ends before it has said anything."""
    return {"started": lambda: os._exit(9)} if IS_WORKER else {}


def worker_hangs():
    """A process beside a rank does not come back where it prepares candidates."""
    return {"make_bench": lambda bucket: time.sleep(LONG)} if IS_WORKER else {}


def worker_cannot_run_a_candidate():
    """What is no default fails at 16 tokens in the processes beside rank 1."""

    def call(inputs, tactic):
        if len(inputs[0]) == 16 and tactic != -1:
            raise RuntimeError("planted")

    return {"timed_call": call} if IS_WORKER and RANK == "1" else {}


def as_on_a_gpu():
    """Candidates are timed the way of a GPU, against stand-ins for CUDA."""

    def patch(*_):
        import cuda_on_cpu

        from pipeline.tune.compare import timing
        from pipeline.tune.ops import cpu_mm

        cuda_on_cpu.stand_in(timing)
        cpu_mm.CpuMatmul.bucket_only = False

    return {"started" if IS_WORKER else "importing": patch}


def no_memory_together():
    """All buckets are timed in one go, for whose last there is no memory on rank 1 while others are held too."""
    made = []

    def make(bucket):
        made.append(bucket)
        if not IS_WORKER and RANK == "1" and made == [1, 16]:
            raise MemoryError("planted")

    return {"make_bench": make, **as_on_a_gpu()}


CYCLES = 1 << 39  # of a kernel that spins on a GPU: some five minutes


def spin():
    import torch

    torch.cuda._sleep(CYCLES)


def hanging_on_a_gpu():
    """A tactic of each op does not return from the GPU at 16 tokens, where FlashInfer measures it."""
    return {"before_tactic": lambda inputs, tactic: tactic == 1 and len(inputs[0]) == 16 and spin()}


def hanging_in_rounds_on_a_gpu():
    """The first tactic of cuBLAS does not return at 16 tokens, where samples are taken alone."""

    def launch(inputs, runner, tactic):
        if "Cublas" in type(runner).__name__ and tactic == 0 and len(inputs[0]) == 16:
            spin()

    return {"launch": launch}


def hanging_in_workers_on_a_gpu():
    return hanging_in_rounds_on_a_gpu() if IS_WORKER else {}


# ── another FlashInfer, another user ──


def of_flashinfer(change):
    def patch():
        from flashinfer.autotuner import autotuner

        change(autotuner)

    return {"importing": patch}


def flashinfer_0_6_12():
    return of_flashinfer(lambda _: setattr(sys.modules["flashinfer.version"], "__version__", "0.6.12"))


def no_process_group():
    return of_flashinfer(lambda module: delattr(module, "set_autotune_process_group"))


def name_missing():
    return of_flashinfer(lambda module: delattr(module.AutoTuner, "_get_cache_key"))


def broken_blocklist():
    os.environ["FLASHINFER_TACTICS_BLOCKLIST"] = __file__  # no JSON


def second_keys():
    """Answers of `cpu_mm` stand under a second key, as those of `bmm_fp8` do, which needs a GPU.

    It is that of a weight of shape (1, n, k) in place of (n, k).
    """
    from pipeline.cache import otherkeys

    def other_keys(key):
        other = re.sub(r"^(\('cpu_mm', '\w+', \(\(\d+, \d+\), \()(\d+, \d+\), )", r"\g<1>1, \2", key)
        return (other,) if other != key else ()

    otherkeys.other_keys = other_keys
    otherkeys.other_shapes = lambda shapes: (shapes[0], (1, *shapes[1]), *shapes[2:])


# ── replays ──


def tuning_in_replay():
    return {"looking_up": lambda tuner: setattr(tuner, "is_tuning_mode", True)}


def wrong_output_and_file_changed():
    def change():
        with (pathlib.Path(sys.argv[1]) / "autotune_configs.json").open("ab") as stream:
            stream.write(b"\n")

    once = on_call(1, change)

    def call(tactic, a, b, out):
        out[0, 0] += 1
        once()

    return {"cpu_mm": call}


if os.environ.get("PIPELINE_TEST_WARM"):  # warm.py: processes are forked, not started
    python = lambda _: os.environ["PIPELINE_TEST_WARM"]  # noqa: E731
if FAULT and RANK and os.environ["PIPELINE_TEST_RANK"] in (RANK, "*"):
    globals().update(globals()[FAULT]() or {})
