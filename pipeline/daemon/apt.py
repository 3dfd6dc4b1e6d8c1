"""Reading the host's own apt sources, so that a further Debian suite comes from the mirror that the host uses.

Both spellings are read: deb822 (`*.sources`, stanzas of `Name: value`) and one line per source (`*.list`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

APT = Path("/etc/apt")

# deb [arch=amd64 signed-by=/path] URI SUITE COMPONENT…  (sources.list(5))
_ONE_LINE = re.compile(r"^deb\s+(?:\[[^\]]*\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)(?P<components>(?:\s+\S+)*)$")


@dataclass(frozen=True)
class Source:
    """One mirror and one suite of binary packages."""

    uri: str
    suite: str
    components: tuple[str, ...]


def _stanzas(text: str) -> Iterable[dict[str, str]]:
    """Split deb822 text into stanzas; names in lower case, continuation lines joined by a space."""
    stanza: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        if not line.strip():
            if stanza:
                yield stanza
            stanza, name = {}, ""
        elif line[0] in " \t":
            if name:
                stanza[name] = f"{stanza[name]} {line.strip()}"
        elif ":" in line:
            name, value = line.split(":", 1)
            name = name.strip().lower()
            stanza[name] = value.strip()
    if stanza:
        yield stanza


def parse_deb822(text: str) -> tuple[Source, ...]:
    """Read the text of a `*.sources` file; disabled and source-only stanzas are left out."""
    found = []
    for stanza in _stanzas(text):
        if "deb" not in stanza.get("types", "").split() or stanza.get("enabled", "yes").lower() in {"no", "false", "0"}:
            continue
        components = tuple(stanza.get("components", "").split())
        found += [
            Source(uri.rstrip("/"), suite, components)
            for uri in stanza.get("uris", "").split()
            for suite in stanza.get("suites", "").split()
        ]
    return tuple(found)


def parse_one_line(text: str) -> tuple[Source, ...]:
    """Read the text of a `*.list` file; comments and `deb-src` lines are left out."""
    found = []
    for line in text.splitlines():
        match = _ONE_LINE.match(line.split("#", 1)[0].strip())
        if match:
            found.append(Source(match["uri"].rstrip("/"), match["suite"], tuple(match["components"].split())))
    return tuple(found)


def host_sources(apt: Path = APT) -> tuple[Source, ...]:
    """Every enabled source of binary packages of this host, in the order in which apt reads the files."""
    found: list[Source] = []
    main = apt / "sources.list"
    parts = apt / "sources.list.d"
    files = [main] if main.is_file() else []
    files += sorted(p for p in parts.glob("*") if p.suffix in {".list", ".sources"}) if parts.is_dir() else []
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        found += parse_deb822(text) if file.suffix == ".sources" else parse_one_line(text)
    return tuple(found)


def mirrors(sources: Iterable[Source], suite: str) -> tuple[str, ...]:
    """The addresses from which `suite` comes with its component `main`, without repeats."""
    return tuple(dict.fromkeys(s.uri for s in sources if s.suite == suite and "main" in s.components))
