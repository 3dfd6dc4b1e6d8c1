"""Processes that end with the one that started them; when it is killed, tests/tune shows it with real ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from pipeline.tune.tied import ENV_STARTER, starter


def begin(told: str) -> tuple[int, str]:
    code = "from pipeline.tune.tied import tie; tie(); print('began')"
    environment = {**os.environ, ENV_STARTER: told}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize("told", [starter()[ENV_STARTER], "", "nonsense"], ids=["starter", "nothing", "nonsense"])
def test_who_is_not_known_to_be_gone_is_there(told: str) -> None:
    assert begin(told) == (0, "began\n")


def test_a_process_whose_starter_is_gone_already_does_not_begin() -> None:
    pid = starter()[ENV_STARTER].split()[0]
    assert begin(f"{pid} 1") == (-signal.SIGKILL, "")  # another process has its pid by now
