"""Token counts: FlashInfer's own, and those that a user names as counts and ranges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.buckets import LARGEST, MOST, default_buckets, flashinfer_buckets, read_buckets
from pipeline.planning.problems import Problems

CAPTURED = "1,2,4,8-256:8,272-512:16"


def read(text):
    problems = Problems()
    return read_buckets(text, problems), problems.found


def test_what_a_server_captures_is_three_counts_and_two_ranges():
    counts, wrong = read(CAPTURED)
    assert (counts, wrong) == ((1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)), [])
    assert len(counts) == 51


@pytest.mark.parametrize(
    ("text", "counts"),
    [("", ()), (" , ", ()), ("64,1 64\n8", (1, 8, 64)), ("8-8:4", (8,)), ("16-32:8,8-24:8,1", (1, 8, 16, 24, 32)),
     (f"1-{MOST}:1", tuple(range(1, MOST + 1))), (f"{LARGEST}-{LARGEST}:1", (LARGEST,))],
)  # fmt: skip
def test_counts_and_ranges_are_sorted_without_repeats(text, counts):
    assert read(text) == (counts, [])


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        *(
            (t, f"--buckets={t} is neither a count nor a range with a step", "first-last:step")
            for t in ("8-", "-8-16:8", "8-16:8:8", "a-b:c", "8-16", "8-4:2", "8-16:0", "-8", "x", "0", "٣", "1048577")
        ),
        ("8-\x1b[2J", "--buckets=8-\\x1b[2J is neither a count nor a range", "first-last:step"),
        (f"1-{'9' * 5000}:1", "9… is neither a count nor a range", "from 1 to 1048576"),
        ("8-250:8", "--buckets=8-250:8 does not reach 250", "8-248:8 ends below it, 8-256:8 above"),
        (f"1-{MOST}:1,8192", "--buckets names 4097 token counts, 4096 are the most", "that the server runs"),
    ],
)
def test_bad_buckets_have_one_line_and_a_hint(text, message, hint):
    ((said, remedy),) = read(text)[1]
    assert message in said and hint in remedy
    assert "\n" not in said + remedy and len(said) < 150


@given(st.text("0123456789-:, x", max_size=30))
def test_any_text_is_read_or_refused(text):
    counts, wrong = read(text)
    assert counts == tuple(sorted(set(counts))) and all(1 <= count <= LARGEST for count in counts)
    assert all(said and hint for said, hint in wrong)


def test_flashinfers_buckets():
    assert flashinfer_buckets(8192) == (
        1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 8192,
    )  # fmt: skip
    assert default_buckets("cpu", None) == default_buckets("cuda", 100) == (1, 2, 4, 8, 16, 32, 64, 128)
    assert default_buckets("cuda", None)[-1] == 8192
