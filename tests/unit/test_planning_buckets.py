"""The buckets that a user names: counts and ranges, read by one reader and spelled again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.buckets import LARGEST, MOST, read_buckets, spell_buckets
from pipeline.planning.problems import Problems

CAPTURED = "1,2,4,8-256:8,272-512:16"


def read(text: str) -> tuple[int, ...]:
    problems = Problems()
    counts = read_buckets(text, problems)
    assert problems.found == []
    return counts


def wrong(text: str) -> list[tuple[str, str]]:
    problems = Problems()
    read_buckets(text, problems)
    return problems.found


def test_what_an_engine_captures_is_three_counts_and_two_ranges() -> None:
    assert read(CAPTURED) == (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    assert len(read(CAPTURED)) == 51


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("", ()),
        (" , ", ()),
        ("8", (8,)),
        ("64,1 64\n8", (1, 8, 64)),
        ("8-8:4", (8,)),
        ("8-16:8", (8, 16)),
        ("16-32:8,8-24:8,1", (1, 8, 16, 24, 32)),
        (f"1-{MOST}:1", tuple(range(1, MOST + 1))),
        (f"{LARGEST}-{LARGEST}:1", (LARGEST,)),
    ],
)
def test_counts_and_ranges_are_sorted_without_repeats(text: str, counts: tuple[int, ...]) -> None:
    assert read(text) == counts


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("8-", "--buckets=8- is neither a count nor a range", "such as 1,2,4,8-256:8"),
        ("-8-16:8", "--buckets=-8-16:8 is neither a count nor a range", "first-last:step"),
        ("8:2", "--buckets=8:2 is neither a count nor a range", "first-last:step"),
        ("8-16:", "--buckets=8-16: is neither a count nor a range", "first-last:step"),
        ("8-16:8:8", "--buckets=8-16:8:8 is neither a count nor a range", "first-last:step"),
        ("a-b:c", "--buckets=a-b:c is neither a count nor a range", "first-last:step"),
        ("8–16:8", "--buckets=8–16:8 is neither a count nor a range", "first-last:step"),
        ("٨-١٦:٨", "is neither a count nor a range", "first-last:step"),
        ("8-\x1b[2J", "--buckets=8-\\x1b[2J is neither a count nor a range", "first-last:step"),
        ("8-16", "--buckets=8-16 has no step", "8-16:1 is every count"),
        ("8-4:2", "--buckets=8-4:2 ends before it begins", "first-last:step"),
        ("8-16:0", "--buckets=8-16:0 is out of range", "first, last and step are 1 to 1048576"),
        ("0-16:8", "--buckets=0-16:8 is out of range", "first, last and step are 1 to 1048576"),
        (f"1-{LARGEST + 1}:1", "is out of range", "first, last and step are 1 to 1048576"),
        (f"1-{'9' * 5000}:1", "9… is out of range", "first, last and step are 1 to 1048576"),
        ("8-250:8", "--buckets=8-250:8 does not reach 250", "8-248:8 ends below it, 8-256:8 above"),
        ("-8", "--buckets=-8 is out of range", "takes 1 to 1048576"),
        ("x", "--buckets=x is not a whole number", "takes 1 to 1048576"),
        (f"1-{MOST + 1}:1", "--buckets names 4097 token counts, 4096 are the most", "that the server runs"),
        (f"1-{LARGEST}:1", "--buckets names 1048576 token counts, 4096 are the most", "that the server runs"),
        (f"1-{MOST}:1,8192", "--buckets names 4097 token counts, 4096 are the most", "that the server runs"),
    ],
)
def test_bad_buckets_have_one_line_and_a_hint(text: str, message: str, hint: str) -> None:
    ((said, remedy),) = wrong(text)
    assert message in said
    assert hint in remedy
    assert "\n" not in said + remedy
    assert len(said) < 150


def test_every_wrong_word_is_said() -> None:
    assert [said.partition(" ")[0] for said, _ in wrong("8-,1,9-16,x,16-8:2")] == [
        "--buckets=8-", "--buckets=9-16", "--buckets=x", "--buckets=16-8:2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "spelled"),
    [
        ((), ""),
        ((8,), "8"),
        ((1, 8), "1,8"),
        ((8, 16, 24), "8,16,24"),
        ((8, 16, 24, 32), "8-32:8"),
        ((1, 2, 3, 4, 6, 8, 10), "1-4:1,6,8,10"),
        (read(CAPTURED), CAPTURED),
    ],
)
def test_equal_steps_are_spelled_as_a_range(counts: tuple[int, ...], spelled: str) -> None:
    assert spell_buckets(counts) == spelled


@given(st.sets(st.integers(1, 60) | st.integers(1, LARGEST), max_size=40))
def test_what_is_spelled_is_read_again(counts: set[int]) -> None:
    ordered = tuple(sorted(counts))
    assert read(spell_buckets(ordered)) == ordered


@given(st.text("0123456789-:, x", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    problems = Problems()
    counts = read_buckets(text, problems)
    assert counts == tuple(sorted(set(counts)))
    assert all(1 <= count <= LARGEST for count in counts)
    assert all(said and hint for said, hint in problems.found)
