"""A FlashInfer that cannot be used is refused in a line that says what it lacks, whatever its import does."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.contract.errors import PipelineError
from pipeline.tune import flashinfer_api
from pipeline.tune.flashinfer_api import FlashInferMissing, FlashInferMoved
from pipeline.tune.strategies import FlashInferOfNoVersion, FlashInferTooOld

GOOD = '__version__ = "0.6.16.post3"'


@pytest.mark.parametrize(
    ("package", "version", "error", "said"),
    [
        ("raise RuntimeError('undefined symbol\\nmore')", GOOD, FlashInferMissing, "RuntimeError: undefined symbol$"),
        ("import sys; sys.exit('no licence')", GOOD, FlashInferMissing, "SystemExit: no licence"),
        ("raise OSError('read-only')", GOOD, FlashInferMissing, "cannot write its workspace"),
        ("", GOOD, FlashInferMissing, "flashinfer.autotuner"),
        ("autotuner = None", "", FlashInferMissing, "flashinfer.autotuner"),
        ("", "__version__ = None", FlashInferOfNoVersion, "'None'"),
        ("", '__version__ = "main"', FlashInferOfNoVersion, "'main'"),
        ("", '__version__ = "0.6.15.post1"', FlashInferTooOld, "no process group"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str, error: type[PipelineError], said: str
) -> None:
    _lay(tmp_path, monkeypatch, package, version)
    with pytest.raises(error, match=said):
        flashinfer_api.load()


def test_a_missing_version_is_a_name_among_the_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = _lay(tmp_path, monkeypatch, "", "")
    for name in ("autotuner/__init__.py", "autotuner/autotuner.py", "jit/__init__.py", "jit/env.py"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).touch()
    with pytest.raises(FlashInferMoved) as caught:
        flashinfer_api.load()
    assert "missing: flashinfer.version.__version__" in caught.value.details


def test_private_names_stand_in_one_file() -> None:
    """But for the methods that the subclass of AutoTuner overrides and calls on itself."""
    names = [*(name for some in flashinfer_api.NAMES.values() for name in some), *flashinfer_api.INSTANCE]
    private = sorted({last for name in [*names, *flashinfer_api.NEWER] if (last := name.rpartition(".")[2])[0] == "_"})
    found = re.compile(rf"(?<!self)(?<!super\(\))\.({'|'.join(private)})\b")
    place = Path(flashinfer_api.__file__).parent
    where = [
        path for path in place.rglob("*.py") if path.name != "flashinfer_api.py" and found.search(path.read_text())
    ]
    assert len(private) > 10
    assert [path.name for path in where] == []


def _lay(root: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str) -> Path:
    place = root / "flashinfer"
    place.mkdir()
    (place / "__init__.py").write_text(package)
    (place / "version.py").write_text(version)
    monkeypatch.syspath_prepend(str(root))
    return place


@pytest.fixture(autouse=True)
def _none_imported() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]
