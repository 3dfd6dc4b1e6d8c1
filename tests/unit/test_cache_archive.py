"""Unpacking tar streams: what is sound arrives, what is not leaves nothing behind."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cache.archive import ArchiveRefused, safe_extract


def member(name, data=b"x", kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, len(data) if kind == tarfile.REGTYPE else 0, link
    return info, data


def archive(*members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return out.getvalue()


def chunked(data, size=700):
    return (data[i : i + size] for i in range(0, len(data), size))


GOOD = (member("root", kind=tarfile.DIRTYPE), member("root/a/b.json", b"{}"), member("root/c", b"1" * 5000))


def test_a_sound_archive_arrives(tmp_path):
    files = safe_extract(chunked(archive(*GOOD)), tmp_path / "out", strip=1)
    assert [str(f.relative_to(tmp_path / "out")) for f in files] == ["a/b.json", "c"]
    assert (tmp_path / "out" / "c").read_bytes() == b"1" * 5000
    assert (tmp_path / "out" / "c").stat().st_mode & 0o777 == 0o644
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    safe_extract(io.BytesIO(archive(*GOOD)), tmp_path / "two")
    assert (tmp_path / "two" / "root" / "c").is_file()


BAD = {
    "parent": (member("root/../../x"), "leads out of the directory"),
    "absolute": (member("/etc/x"), "is an absolute name"),
    "symbolic link": (member("root/l", kind=tarfile.SYMTYPE, link="/etc/passwd"), "is a link to /etc/passwd"),
    "hard link": (member("root/l", kind=tarfile.LNKTYPE, link="root/c"), "is a link to root/c"),
    "device": (member("root/d", kind=tarfile.CHRTYPE), "is neither a file nor a directory"),
    "pipe": (member("root/p", kind=tarfile.FIFOTYPE), "is neither a file nor a directory"),
    "twice": (member("root/c", b"2"), "occurs twice"),
    "twice, spelled otherwise": (member("root/./c", b"2"), "occurs twice"),
    "file as directory": (member("root/c/d"), "cannot be written"),
    "control character": (member("root/a\nb"), "is not a plain name"),
    "above": (member("stray"), "lies above what was asked for"),
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_each_kind_is_refused_and_nothing_is_left(tmp_path, kind):
    bad, expected = BAD[kind]
    with pytest.raises(ArchiveRefused) as caught:
        safe_extract(chunked(archive(*GOOD, bad)), tmp_path / "out", strip=1)
    assert any(expected in line for line in caught.value.details), caught.value.details
    assert list(tmp_path.iterdir()) == []


def test_every_reason_at_once(tmp_path):
    with pytest.raises(ArchiveRefused) as caught:
        safe_extract(chunked(archive(*(bad for bad, _ in BAD.values()))), tmp_path / "out", strip=1)
    assert len(caught.value.details) >= 8


def test_bounds(tmp_path):
    big = archive(member("root/big", bytes(1 << 20)))
    with pytest.raises(ArchiveRefused, match="larger than"):
        safe_extract(chunked(big, 1 << 16), tmp_path / "out", limit=1 << 19)
    with pytest.raises(ArchiveRefused, match="not a readable tar"):
        safe_extract(chunked(big[: 1 << 19], 1 << 16), tmp_path / "out")
    for data in (b"", b"x" * 5000, b"\x1f\x8b" + b"x" * 600):
        with pytest.raises(ArchiveRefused, match="not a readable tar"):
            safe_extract(iter([data]), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_never_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "c").write_text("mine")
    with pytest.raises(ArchiveRefused, match="exists in the destination"):
        safe_extract(chunked(archive(*GOOD)), tmp_path / "out", strip=1)
    assert (tmp_path / "out" / "c").read_text() == "mine"
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["c"]


def test_a_long_chain_of_headers_does_not_exhaust_the_stack(tmp_path):
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2
    block = info.tobuf(tarfile.GNU_FORMAT) + b"a\0".ljust(512, b"\0")
    with pytest.raises(ArchiveRefused):
        safe_extract(iter([block * 3000]), tmp_path / "out")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damage_is_refused_or_harmless(tmp_path_factory, data):
    whole = archive(*GOOD)
    at = data.draw(st.integers(0, len(whole) - 1))
    broken = whole[:at] + data.draw(st.binary(max_size=8)) + whole[at + data.draw(st.integers(0, 600)) :]
    root = tmp_path_factory.mktemp("fuzz")
    try:
        files = safe_extract(chunked(broken), root / "out", strip=1)
        assert all(f.resolve().is_relative_to(root / "out") for f in files)
    except ArchiveRefused:
        assert list(root.iterdir()) == []
