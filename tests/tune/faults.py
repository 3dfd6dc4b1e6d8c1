"""Faults for tests, planted through the places that the tuner offers (`pipeline.tune.hooks`).

The tuner runs this file as PIPELINE_TUNE_TEST_HOOKS. PIPELINE_TEST_FAULT names a row of FAULTS, whose functions are
planted in the rank PIPELINE_TEST_RANK (`*`: in each) and in the process beside it.
"""

import ctypes
import dataclasses
import errno
import os
import pathlib
import signal
import sys
import time

FAULT, RANK = os.environ.get("PIPELINE_TEST_FAULT", ""), os.environ.get("RANK", "")
IS_WORKER = "--multiprocessing-fork" in sys.orig_argv  # the process beside a rank
LONG = 600  # seconds: longer than any timeout of a test
CYCLES = 1 << 39  # of a kernel that spins on a GPU: some five minutes


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


def spin():
    import torch

    torch.cuda._sleep(CYCLES)


def on_call(number, action):
    """A function that acts in its n-th call alone."""
    count = [0]

    def call(*_):
        count[0] += 1
        if count[0] == number:
            action()

    return call


# ── which tactics ──


def is_bad(tactic, out):
    """Two tactics at one bucket of `wide`."""
    return tactic != -1 and tuple(tactic[:2]) == ("blas", "nk") and out.shape == (8, 192)


def is_one_bad(tactic, out):
    return is_bad(tactic, out) and tactic[-1] == 1


FAST = ("upcast", "nk", 0, 0, 1)
ONE_IS_FAST = {"measured": lambda time_ms, tactic: 0.1 if tactic == FAST else 1.0}


def in_verifying(tactic, out):
    """A token count of `narrow` at which nothing is measured."""
    return tactic != -1 and tactic[0] == "upcast" and out.shape == (24, 64)


def wrong_or_slow(tactic, a, b, out):
    if tactic != -1 and tactic[0] == "upcast":
        out.zero_()
    else:
        time.sleep(0.0005)


def hang_of_rank_1(after):
    """The fast tactic hangs on rank 1 where it is compared, once it has come back so often."""
    seen = [0]

    def call(inputs, tactic, _):
        if len(inputs[0]) == 16 and tactic == FAST:
            seen[0] += 1
            if RANK == "1" and seen[0] > after:
                hang()

    return call


# ── what a place does ──


def change_file():
    with (pathlib.Path(sys.argv[1]) / "autotune_configs.json").open("ab") as stream:
        stream.write(b"\n")


change_file_once = on_call(1, change_file)


def differ(when):
    """Say something else for every field of a contract."""
    return lambda said, now: dict.fromkeys(said, "another") if now == when else None


def other_tactic(held):
    return {**held, min(held): dataclasses.replace(held[min(held)], tactic=["blas", "nk", 0, 0, 99])}


def no_memory_for_the_last(made=[]):  # noqa: B006 - one list for all calls
    """No memory on rank 1 for the last of all buckets, while others are held too."""

    def make(bucket):
        made.append(bucket)
        if not IS_WORKER and RANK == "1" and made == [1, 128, 256]:
            raise MemoryError("planted")

    return make


def planted(kind, **more):
    """A stand-in for an op that needs a GPU, timed as CUDA graphs."""

    def spec(found, op):
        import planted_ops

        return planted_ops.spec(kind, **more)

    return {"spec": spec, "cuda": with_graphs}


def with_graphs(cuda):
    import planted_ops

    return planted_ops.with_graphs(cuda)


def record(inputs, tactic, call):
    import planted_ops

    planted_ops.record(call)


def at_other_counts_too(found, op):
    """`cpu_mm` compared at all counts that its bucket answers, as a product on a GPU is."""

    def build(*words):
        case = found.build(*words)
        case.bucket_only = False
        return case

    return dataclasses.replace(found, build=build)


AS_ON_A_GPU = {"spec": at_other_counts_too, "cuda": with_graphs, "timed_call": record}


def hanging_sample():
    """A sample of one candidate never ends on rank 1, which is met where it is waited for, not where it is launched."""
    ends = []

    def launch(inputs, runner, tactic):
        if RANK == "1" and not IS_WORKER and len(inputs[0]) == 128 and tactic == FAST:
            ends[:] = [False, True]  # the events before and behind it

    def cuda(module):
        import planted_ops

        return planted_ops.hanging(module, hang, lambda: bool(ends) and ends.pop(0))

    return {**AS_ON_A_GPU, **ONE_IS_FAST, "launch": launch, "cuda": cuda}


def of_flashinfer(change):
    def patch():
        from flashinfer.autotuner import autotuner

        change(autotuner)

    return {"importing": patch}


HANG_IN_ROUNDS_ON_A_GPU = {
    "launch": lambda inputs, runner, tactic: (
        "Cublas" in type(runner).__name__ and tactic == 0 and len(inputs[0]) == 16 and spin()
    )
}

FAULTS = {
    # ranks that end, stop or crawl
    "killed": {"before_tactic": on_call(5, kill)},
    "told_to_end": {"before_tactic": on_call(5, lambda: kill(signal.SIGTERM))},
    "stopped": {"before_tactic": on_call(5, lambda: kill(signal.SIGSTOP))},
    "stopped_while_importing": {"importing": lambda: kill(signal.SIGSTOP)},
    "too_slow": {"before_tactic": on_call(5, lambda: time.sleep(LONG))},
    "too_slow_everywhere": {"before_tactic": lambda *_: time.sleep(LONG)},
    "slow": {"before_tactic": lambda *_: time.sleep(0.05)},
    "slow_preparation": {"preparing": on_call(2, lambda: time.sleep(LONG))},
    "stuck_in_narrow": {"before_tactic": lambda inputs, _: inputs[1].shape == (64, 96) and time.sleep(LONG)},
    "killed_when_all_is_done": {"done": kill},
    # memory, disks
    "out_of_memory_in_preparation": {"preparing": exhaust},
    "out_of_memory_in_drawing": {"drawing_inputs": on_call(2, exhaust)},
    "out_of_memory_in_copying": {"copying_inputs": on_call(2, exhaust)},
    "out_of_memory_in_a_tactic": {"before_tactic": on_call(5, exhaust)},
    "out_of_memory_in_collecting": {
        "looking_up": lambda tuner: tuner.watch.questions is not None and fail(MemoryError("planted"))
    },
    "no_room_to_keep": {"before_save": lambda: fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))},
    # ranks that differ
    "each_field_differs_before_tuning": {"contract": differ("before tuning")},
    "each_field_differs_before_wide": {"contract": differ("before wide")},
    "other_seed": {"plan": lambda plan: dataclasses.replace(plan, seed=plan.seed + 1)},
    "other_environment": {"started": lambda: os.environ.update(FLASHINFER_AUTOTUNE_PLANTED="1")},
    "other_tactic": {"entries": other_tactic},
    "steady_clock": {"measured": lambda time_ms, tactic: 1 + sum(map(ord, str(tactic))) / 1000},
    # tactics
    "all_tactics_fail": {"before_tactic": lambda *_: fail(RuntimeError("planted failure"))},
    "default_wins": {"cpu_mm": lambda tactic, *_: tactic != -1 and time.sleep(0.002)},
    "wrong_and_fast": {"cpu_mm": wrong_or_slow},
    "crashing_tactic": {"cpu_mm": lambda tactic, a, b, out: is_bad(tactic, out) and kill(signal.SIGSEGV)},
    "crashing_default": {"cpu_mm": lambda tactic, *_: tactic == -1 and kill(signal.SIGSEGV)},
    "crashing_in_verifying": {
        "cpu_mm": lambda tactic, a, b, out: in_verifying(tactic, out) and os._exit(3),
        "measured": lambda time_ms, tactic: 0.1 if tactic[0] == "upcast" else 1.0,
    },
    "device_lost": {
        "cpu_mm": lambda tactic, a, b, out: is_bad(tactic, out) and fail(RuntimeError("planted illegal access")),
        "context_lost": lambda _: "AcceleratorError: planted",
    },
    "hanging_tactic": {"cpu_mm": lambda tactic, a, b, out: is_one_bad(tactic, out) and hang()},
    "hanging_default": {"cpu_mm": lambda tactic, *_: tactic == -1 and hang()},
    "hanging_in_comparing": {"timed_call": hang_of_rank_1(after=0), **ONE_IS_FAST},
    "hanging_in_rounds": {"timed_call": hang_of_rank_1(after=1), **ONE_IS_FAST},
    "hanging_twice": {
        "cpu_mm": lambda tactic, a, b, out: (is_one_bad(tactic, out) or in_verifying(tactic, out)) and hang(),
        **ONE_IS_FAST,
    },
    # comparing
    "no_memory_to_compare": {"make_bench": lambda bucket: fail(MemoryError("planted"))},
    "worker_dies": {"started": lambda: IS_WORKER and os._exit(9)},
    "worker_hangs": {"make_bench": lambda bucket: IS_WORKER and time.sleep(LONG)},
    "worker_cannot_run_a_candidate": {
        "timed_call": lambda inputs, tactic, _: IS_WORKER
        and RANK == "1"
        and len(inputs[0]) == 16
        and tactic != -1
        and fail(RuntimeError("planted"))
    },
    "worker_lacks_memory": {"make_bench": lambda bucket: IS_WORKER and RANK == "1" and exhaust()},
    "as_on_a_gpu": AS_ON_A_GPU,
    "no_memory_together": {**AS_ON_A_GPU, "make_bench": no_memory_for_the_last()},
    "hanging_sample": hanging_sample(),
    # by hand, on a GPU: a plan of one bf16 product with the bucket 16
    "hanging_on_a_gpu": {"before_tactic": lambda inputs, tactic: tactic == 1 and len(inputs[0]) == 16 and spin()},
    "hanging_in_rounds_on_a_gpu": HANG_IN_ROUNDS_ON_A_GPU,
    "hanging_in_workers_on_a_gpu": HANG_IN_ROUNDS_ON_A_GPU if IS_WORKER else {},
    # another FlashInfer, another user
    "flashinfer_0_6_12": of_flashinfer(lambda _: setattr(sys.modules["flashinfer.version"], "__version__", "0.6.12")),
    "no_process_group": of_flashinfer(lambda module: delattr(module, "set_autotune_process_group")),
    "name_missing": of_flashinfer(lambda module: delattr(module.AutoTuner, "_get_cache_key")),
    "broken_blocklist": {"started": lambda: os.environ.update(FLASHINFER_TACTICS_BLOCKLIST=__file__)},  # no JSON
    # ops that need a GPU
    "fp8": planted("Fp8"),
    "moe": planted("Moe"),
    "moe_wrong": planted("Moe", wrong=2, reference_needs=100),
    "moe_crashes": planted("Moe", crashes=2),
    "moe_lacks_memory": planted("Moe", call_needs=5),
    # replays
    "tuning_in_replay": {"looking_up": lambda tuner: setattr(tuner, "is_tuning_mode", True)},
    "wrong_output_and_file_changed": {
        "cpu_mm": lambda tactic, a, b, out: (out[0, 0].add_(1), change_file_once())
    },
}  # fmt: skip

if os.environ.get("PIPELINE_TEST_WARM"):  # warm.py: processes are forked, not started
    python = lambda _: os.environ["PIPELINE_TEST_WARM"]  # noqa: E731
if FAULT and RANK and os.environ["PIPELINE_TEST_RANK"] in (RANK, "*"):
    globals().update(FAULTS[FAULT])
