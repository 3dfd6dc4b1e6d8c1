"""What GPU processes die of is recognised in what they print, and comes with its remedy."""

from __future__ import annotations

import signal

import pytest

from pipeline.tune.causes import remedy
from pipeline.tune.diagnose import diagnose
from pipeline.tune.rank import RankFailure
from pipeline.tune.steps import RankStep
from pipeline.tune.troubles import RankState, Situation


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-7aXc to 9637892 bytes", "--shm-size"),
        ("NCCL WARN Error while creating shared memory segment /dev/shm/nccl-JLSvrF (size 9637888)", "--shm-size"),
        ("unable to write to file </torch_12_3>: No space left on device (28), /dev/shm", "--shm-size"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.", "--max-tokens"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "--max-tokens"),
        ("CUDA driver version is insufficient for CUDA runtime version", "driver is older"),
        ("ValueError: no such thing", "otherwise"),
        ("OSError: [Errno 28] No space left on device: /var/lib", "free room"),
    ],
)
def test_a_known_cause_has_its_remedy(line: str, word: str) -> None:
    assert word in remedy(["before", line, "after"], "otherwise")


def test_a_rank_that_fails_of_a_known_cause_says_the_remedy() -> None:
    step = RankStep(rank=1, pid=1, started="1", step="measuring", op=1, collective=7)
    failure = RankFailure(1, "bug", 1, "torch.OutOfMemoryError: CUDA out of memory")
    assert "--max-tokens" in diagnose(Situation([RankState(1, step, "S", failure=failure)])).hint
    assert "--shm-size" in diagnose(Situation([RankState(1, step, "", status=-signal.SIGBUS)])).hint
    assert "SIGKILL" in diagnose(Situation([RankState(1, step, "", status=-signal.SIGKILL)])).hint
