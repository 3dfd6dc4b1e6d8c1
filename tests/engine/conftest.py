"""Engine tests get a real Docker Engine: the one that answers, else a private one that they start and leave running."""

from __future__ import annotations

import os

import pytest

from pipeline.engine import Engine, ensure
from pipeline.engine.errors import NoEngine


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The engine. A missing one fails the run; only a person who is not root, outside CI, may go without."""
    try:
        return ensure()
    except NoEngine as error:
        if os.environ.get("CI") != "true" and os.geteuid() != 0:
            pytest.skip(f"{error.message}; {error.hint}")
        raise
