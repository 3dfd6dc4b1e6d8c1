"""Variables of make that were not set: an empty word reaches the command, or none, and what is missing is named."""

from __future__ import annotations

import pytest

from pipeline.__main__ import main


@pytest.mark.parametrize(
    "words, missing, variable",
    [
        (("cache", "pull", "oci://localhost:1/caches:h200", "-o", ""), "an empty path", "--output"),
        (("attestation", "verify", ""), "no image was named", "IMAGE="),
        (("release", "run"), "nothing to release was named", "MATRIX="),
    ],
)
def test_what_is_missing_is_named_by_its_variable(
    words: tuple[str, ...], missing: str, variable: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(list(words))
    err = capsys.readouterr().err
    assert code == 2 and missing in err and variable in err
