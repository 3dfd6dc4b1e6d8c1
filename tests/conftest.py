"""Options that all kinds of tests share."""

from __future__ import annotations

import pytest


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
