"""From what each rank said to the one sentence, the rank, the tactic and the remedy that a user reads."""

from __future__ import annotations

import math
import signal
from dataclasses import asdict, replace
from typing import Any

import pytest

from pipeline.contract.errors import CacheRefused, UsageError, WarmUpError
from pipeline.contract.manifest import Covered
from pipeline.contract.plan import OpPlan
from pipeline.tune.failures import (
    MEASURED_NOTHING,
    ONE_CANDIDATE,
    RankFailure,
    RankState,
    RankTrouble,
    Situation,
    describe,
    diagnose,
    doubt,
    doubtful,
    least_ms,
    remedy,
)
from pipeline.tune.steps import Attempt, Crash, RankStep

ONE, OTHER = (Attempt("bf16_gemm", "Runner", [number], [[16, 8]], 16) for number in (1, 2))
TIMED_OUT = RankFailure(0, "collective", 6, "all_reduce failed: timed out")


def rank(
    number: int, trying: Attempt | None = None, *, process: str = "R", status: int | None = None, silent: float = 300.0,
    failure: RankFailure | None = None, **step: Any,
) -> RankState:  # fmt: skip
    said = RankStep(number, 2, step="tuning qkv", op=1, trying=trying.fits if trying else None, **step)
    return RankState(number, said, "" if status is not None else process, silent, failure, status)


def found(*ranks: RankState, waited: float | None = None, **more: Any) -> RankTrouble:
    return diagnose(Situation(ranks, waited, ops=("qkv",), stuck_after=290.0, **more))


WAITING = rank(0, waiting=True, collective=7)
GAVE_UP = rank(0, ONE, waiting=True, state="failed", failure=TIMED_OUT)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([WAITING, rank(1, status=-signal.SIGKILL)], "rank 1 was ended by SIGKILL at: tuning qkv"),
        ([GAVE_UP, rank(1, status=-signal.SIGTERM)], "rank 1 was ended by SIGTERM at: tuning qkv"),
        ([WAITING, rank(1, ONE, status=-signal.SIGKILL)], "rank 1 was ended by SIGKILL at: tuning qkv"),
        ([WAITING, rank(1, status=-signal.SIGSEGV)], "rank 1 was ended by SIGSEGV at: tuning qkv"),
        ([WAITING, rank(1, status=3)], "rank 1 ended with 3 at: tuning qkv"),
        ([WAITING, rank(1, status=0)], "rank 1 ended without an error message at: tuning qkv"),
        ([WAITING, RankState(1, None, status=1)], "rank 1 ended with 1 at: its start, before it said anything"),
        ([RankState(0, None, status=1), RankState(1, None, "S")], "no rank started"),
        ([WAITING, rank(1, process="T")], "rank 1 is stopped at: tuning qkv"),
        ([GAVE_UP, rank(1, ONE, process="t")], "rank 1 is stopped at: tuning qkv"),
        ([WAITING, RankState(1, None, "T")], "rank 1 is stopped at: its start, before it said anything"),
        ([WAITING, rank(1, silent=9.0), replace(WAITING, rank=2)],
         "rank 1 made no progress for 14 s at: tuning qkv; the other ranks waited for it"),
        ([WAITING, RankState(1, None, "S")],
         "rank 1 made no progress for 14 s at: its start, before it said anything; the other ranks waited for it"),
        ([rank(0, waiting=True, collective=9), rank(1, waiting=True, collective=4)],
         "rank 1 waits in its collective 4 at: tuning qkv (waiting for the other ranks); rank 0 is at collective 9"),
        ([WAITING, replace(WAITING, rank=1)],
         "the ranks wait for each other for 14 s at: tuning qkv (waiting for the other ranks)"),
    ],
)  # fmt: skip
def test_the_right_rank_is_named(ranks: list[RankState], said: str) -> None:
    error = found(*ranks, waited=14.0)
    assert error.message == said
    assert isinstance(error, WarmUpError)
    assert (error.crashes, error.stalls, list(error.states)) == ((), (), ranks)
    assert "nothing was saved" in error.hint or said == "no rank started"


@pytest.mark.parametrize(("code", "family"), [(2, UsageError), (6, WarmUpError), (7, CacheRefused)])
def test_an_expected_error_of_a_rank_keeps_its_exit_code(code: int, family: type[Exception]) -> None:
    failure = RankFailure(1, "refused", code, "no", "do this", ("why",))
    error = found(WAITING, rank(1, failure=failure))
    assert isinstance(error, family)
    assert (error.message, error.hint, error.details, error.exit_code) == ("rank 1: no", "do this", ("why",), code)
    both = found(*(rank(number, failure=replace(failure, rank=number)) for number in (0, 1)))
    assert both.message == "no", "what every rank says is reported once"


@pytest.mark.parametrize("status", [-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, 3, 134])
def test_who_ends_by_itself_in_a_tactic_was_ended_by_it(status: int) -> None:
    error = found(WAITING, rank(1, ONE, status=status))
    (crash,) = error.crashes
    assert (crash.op, crash.attempt) == ("qkv", ONE)
    assert error.message == f"a tactic ended its rank: {crash.told()}"
    assert crash.told().startswith("Runner tactic [1] of bf16_gemm at 16 tokens (qkv): rank 1 ")
    row = crash.blocked()
    assert (row["op"], row["bucket"], row["runner"], row["tactic"]) == ("qkv", 16, "Runner", [1])
    assert Crash.from_json(asdict(crash)) == crash


def test_a_lost_gpu_names_the_tactic_that_took_it() -> None:
    error = found(rank(1, ONE, failure=RankFailure(1, "device", 6, "AcceleratorError: illegal access")))
    assert error.crashes[0].reason == "the GPU of rank 1 takes no more work: AcceleratorError: illegal access"


def test_all_tactics_of_a_call_that_ended_are_left_out_and_no_default_is_blamed_beside_one() -> None:
    """The two products of a MoE layer are looked up before either runs."""
    first, default = replace(ONE, custom_op="gemm1"), replace(ONE, custom_op="gemm2", tactic=-1)
    second = replace(ONE, custom_op="gemm2", tactic=7)
    for last, blamed in ((default, ["gemm1"]), (second, ["gemm2", "gemm1"])):
        error = found(rank(1, replace(last, also=[asdict(first)]), status=-signal.SIGSEGV))
        assert [one.attempt.custom_op for one in error.crashes] == blamed


def test_the_rank_inside_the_call_is_the_one_that_does_not_return() -> None:
    error = found(GAVE_UP, rank(1, ONE), replace(GAVE_UP, rank=2))
    assert error.message == (
        "rank 1 made no progress at: tuning qkv, in Runner tactic [1] of bf16_gemm at 16 tokens (qkv); "
        "the other ranks waited for it"
    )
    assert [(one.attempt, one.reason) for one in error.crashes] == [(ONE, "did not return within 300 s on rank 1")]
    assert [(one.rank, one.doubtful) for one in error.stalls] == [(1, True)]


@pytest.mark.parametrize(
    ("ranks", "tactics", "doubtful"),
    [
        # Without a group the watchdog finds it, and other ranks go on
        ([rank(0, OTHER, silent=3.0, returned=9), rank(1, ONE, silent=311.0, returned=9), WAITING], [[1]], [False]),
        # On all ranks the same one: nothing says that a rank is to blame
        ([rank(0, ONE, silent=310.0), rank(1, ONE, silent=310.5)], [[1]], [False, False]),
        ([rank(0, OTHER, silent=310.0), rank(1, ONE, silent=310.5)], [[1], [2]], [True, True]),
        ([rank(0, ONE, silent=310.0)], [[1]], [True]),
    ],
    ids=["one of three", "the same on all", "different ones", "one rank alone"],
)
def test_tactics_that_hang_are_named_and_whether_the_rank_may_be_to_blame(
    ranks: list[RankState], tactics: list[Any], doubtful: list[bool]
) -> None:
    error = found(*ranks, waited=310.0)
    assert sorted(one.attempt.tactic for one in error.crashes) == tactics
    assert [one.doubtful for one in error.stalls] == doubtful


@pytest.mark.parametrize(
    ("ranks", "waited"),
    [
        ([GAVE_UP, rank(1)], None),
        ([GAVE_UP, rank(1, ONE, silent=200.0)], None),  # it was elsewhere for most of the time that the others waited
        ([rank(0, silent=310.0), rank(1, ONE, silent=310.0)], 310.0),
        ([GAVE_UP, rank(1, ONE), RankState(2, None, "S")], None),
        ([rank(0, ONE), rank(1, ONE)], None),
    ],
    ids=[
        "between tactics",
        "not for long enough",
        "beside a rank in none",
        "beside one that says nothing",
        "no timeout",
    ],
)
def test_no_tactic_is_to_blame(ranks: list[RankState], waited: float | None) -> None:
    error = found(*ranks, waited=waited)
    assert "made no progress" in error.message
    assert (error.crashes, error.stalls) == ((), ())


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-7aXc to 9637892 bytes", "--shm-size"),
        ("NCCL WARN Error while creating shared memory segment /dev/shm/nccl-JLSvrF (size 9637888)", "--shm-size"),
        ("unable to write to file </torch_12_3>: No space left on device (28), /dev/shm", "--shm-size"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.", "--max-tokens"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "--max-tokens"),
        ("CUDA driver version is insufficient for CUDA runtime version", "driver is older"),
        ("OSError: [Errno 28] No space left on device: /var/lib", "free room"),
        ("ValueError: no such thing", "otherwise"),
    ],
)
def test_a_known_cause_has_its_remedy(line: str, word: str) -> None:
    assert word in remedy(["before", line, "after"], "otherwise")


def test_a_rank_that_fails_of_a_known_cause_says_the_remedy() -> None:
    failure = RankFailure(1, "bug", 1, "torch.OutOfMemoryError: CUDA out of memory", details=("Traceback", "line"))
    error = found(rank(1, failure=failure), tail=("printed",))
    assert error.message == f"rank 1 failed at: tuning qkv: {failure.message}"
    assert "--max-tokens" in error.hint and error.details[:2] == failure.details
    assert "--shm-size" in found(rank(1, status=-signal.SIGBUS)).hint
    assert "SIGKILL" in found(rank(1, status=-signal.SIGKILL)).hint
    unsaid = found(rank(0, state="failed", status=1), tail=("No space left on device: /tmp",))
    assert "free room" in unsaid.hint


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        RuntimeError("Storage size calculation overflowed with sizes=[1000000000000, 1000000000000]"),
    ],
)
def test_memory_that_runs_out_anywhere_is_said_without_a_traceback(error: Exception) -> None:
    failure = describe(3, error, "preparing o (mm_bf16)")
    assert (failure.kind, failure.message) == ("refused", "out of memory at: preparing o (mm_bf16)")
    assert "--max-tokens" in failure.hint
    assert len(failure.details) == 1


def test_odd_choices_are_noted() -> None:
    assert doubt([1.0, math.inf], 0.1) == ONE_CANDIDATE
    assert doubt([0.0, 0.0], 0.0).startswith(MEASURED_NOTHING)
    assert doubt([0.001, 0.002], 0.01).startswith(MEASURED_NOTHING)
    assert doubt([0.001, 0.02], 0.01) == doubt([], 1.0) == doubt([math.inf], 1.0) == ""
    op = OpPlan("up", "mm_bf16", {"n": 28672, "k": 8192}, {}, (1, 8192))
    assert least_ms(op, 8192) == pytest.approx(2e3 * 8192 * 28672 * 8192 / 2e16)
    rows = [Covered("up", b, f"k{b}", "R", 1, 1, note=ONE_CANDIDATE) for b in (1, 8)]
    assert doubtful([*rows, Covered("o", 1, "k", "R", 1, 2)]) == [f"up at 1, 8 tokens: {ONE_CANDIDATE}"]
