"""Write commands.md beside this file from the parser of `pipeline`: `make docs` runs it, a test compares the two."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.__main__ import parser_for
from pipeline.commands import commands
from pipeline.contract.errors import MEANING

PAGE = Path(__file__).with_name("commands.md")
_HEAD = """\
# Commands

<!-- Written by docs/reference/generate.py from the parser. Do not edit: run `make docs`. -->

In a checkout `pipeline` is `.venv/bin/python -m pipeline`, and `make .venv/ready` makes that environment. Data goes to
stdout, everything else to stderr. Every command takes `-h`, `-v` (say more) and `-q` (only warnings and errors).
A MODEL is explained in [models](models.md), a location of a cache (`PATH|IMAGE|oci://…`) in [cache](cache.md).

## Exit codes

`make` shows them as `Error N` and itself ends with 2.

| code | meaning |
|---|---|
"""


def page() -> str:
    """The whole page, the same on every version of Python."""
    known = {words: _groups(parser_of(words)) for words, _ in commands()}
    shared = Counter(group for groups in known.values() for group in groups.items() if group[0])
    lines = [_HEAD + "".join(f"| {code.value} | {meaning} |\n" for code, meaning in MEANING.items())]
    for words, command in commands():
        name = " ".join(["pipeline", *words])
        lines += [f"## {name}\n", f"{command.help[0].upper()}{command.help[1:]}.\n", "```sh"]
        lines += [f"{name} {example}".rstrip() for example in command.examples]
        lines += ["```\n"]
        below = [title for title, rows in known[words].items() if shared[title, rows] > 1]
        for title, rows in known[words].items():
            if title not in below:
                lines += [f"Options of {title}:\n"] if title else []
                lines.append(rows)
        if below:
            links = ", ".join(f"[{title}](#{_anchor(title)})" for title in below)
            lines.append(f"And the options of {links}.\n")
    for title, rows in (group for group, count in shared.items() if count > 1):
        lines += [f"## Options of {title}\n", rows]
    return "\n".join(lines).rstrip() + "\n"


def _anchor(title: str) -> str:
    return f"options of {title}".replace(" ", "-")


def parser_of(words: tuple[str, ...]) -> argparse.ArgumentParser:
    """The parser of one command."""
    parser: argparse.ArgumentParser = parser_for(words)
    for word in words:
        inner = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = inner.choices[word]
    return parser


def _groups(parser: argparse.ArgumentParser) -> dict[str, str]:
    """A table of arguments for each group; the group without a name has the command's own."""
    found: dict[str, list[str]] = {}
    for group in parser._action_groups:
        title = "" if group.title in ("positional arguments", "options", "optional arguments") else str(group.title)
        for action in group._group_actions:
            if action.dest not in ("help", "verbosity") and action.help != argparse.SUPPRESS:
                found.setdefault(title, []).append(_row(action, parser.prog))
    return {title: "\n".join(["| argument | meaning |", "|---|---|", *rows, ""]) for title, rows in found.items()}


def _row(action: argparse.Action, prog: str) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    value = " ".join(value) if isinstance(value, tuple) else value
    value = {0: "", "+": f"{value} …", "*": f"[{value} …]", "?": f"[{value}]"}.get(action.nargs, value)
    value = f"{value} …" if isinstance(action, argparse._AppendAction) and "…" not in value else value
    names = [" ".join([name, value]).strip() for name in action.option_strings] or [value]
    text = (action.help or "") % {**vars(action), "prog": prog}
    needed = " (required)" if action.option_strings and action.required else ""
    cells = [", ".join(f"`{name}`" for name in names), text + needed]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
