"""Options that all kinds of tests share."""

from __future__ import annotations

import signal
from pathlib import PurePath
from typing import Any

import pytest

# Engine tests that share no image with the others: they have engines of their own, or ask the engine for outlines alone.
APART = {"test_daemon.py", "test_release.py", "test_versions_outline.py"}


def together(nodeid: str) -> str:
    """What must run in one process when `make test` runs two, or a test's own id where it may run anywhere.

    The engine's tests share the engine, the names of its images, and images that take minutes to build; the registry
    tests share registries; the servers' tests share one image, under a name and with a store of its own.
    """
    path = PurePath(nodeid.partition("::")[0])
    if "servers" in path.parts:
        return "servers"
    if "docker" in path.parts:
        return "apart" if path.name in APART else "docker"
    return "release" if "release" in path.parts else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal tests out by `together`; with pytest 9.2 the group marks of pytest-xdist 3.8 group nothing."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

    return Together(config, log)


def pytest_configure() -> None:
    """Take interruptions, and so let what tests start take them: a job in the background is started with SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--run-large`: also what downloads or builds hundreds of megabytes."""
    parser.addoption("--run-large", action="store_true", help="run tests that download or build gigabytes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave large tests out unless they are asked for."""
    if config.getoption("--run-large"):
        return
    for item in items:
        if item.get_closest_marker("large"):
            item.add_marker(pytest.mark.skip(reason="large: run with --run-large"))
