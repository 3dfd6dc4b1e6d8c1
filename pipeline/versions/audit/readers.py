"""Dockerfiles, bake files, requirements and pyproject.toml to places."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator

from pipeline.versions.bake import Text, read_json
from pipeline.versions.dockercommands import commands
from pipeline.versions.dockerfile import NEWEST, Instruction, read
from pipeline.versions.meaning import pinned
from pipeline.versions.relations import SUFFIX
from pipeline.versions.requirements import Pin, logical_lines, parse
from pipeline.versions.variables import assigned, environment

from .commands import Commands, address, image, place
from .places import Place, is_version, package_stem, variable_stem


class NotUnderstood(Exception):
    """A file is not what its name says."""


def dockerfile(path: str, text: str) -> Iterator[Place]:
    """ARGs in every stage, base images, and pins, clones and assignments in what is run."""
    found = read(text, frontend=NEWEST)
    for arg in found.args:
        if arg.raw and arg.value and not re.fullmatch(r"[\"']?\$\{?\w+\}?[\"']?", arg.raw):
            scope = "" if arg.stage is None else str(arg.stage)
            yield Place(path, arg.line, "ARG", arg.name, arg.value, variable_stem(arg.name), scope)
            yield from image(path, arg.line, arg.value)
    for stage in found.stages:
        if stage.parent is None and "$" not in stage.raw_base:
            yield from image(path, stage.line, stage.base)
    for instruction in found.instructions:
        if instruction.name in ("RUN", "ENV"):
            yield from _assignments(path, instruction)
    yield from (place(path, line, said, "command") for line, said in commands(found, Commands()))


def _assignments(path: str, instruction: Instruction) -> Iterator[Place]:
    rest = instruction.rest
    given = environment(rest, {}, ()) if instruction.name == "ENV" else assigned(rest, {}, ())
    for name, value in given.items():
        at = re.search(rf"(?<![\w$]){name}(?=[= ])", rest)
        if at and name.upper().endswith(SUFFIX) and is_version(value):
            kind = "ENV" if instruction.name == "ENV" else "shell"
            yield Place(path, instruction.line_at(at.start()), kind, name, value, variable_stem(name))


def bake(path: str, texts: Iterable[Text]) -> Iterator[Place]:
    """Variables, build arguments and images of a bake file."""
    for text in texts:
        if "${" in text.value or not text.value:
            continue
        match text.path:
            case ("variable", name, "default"):
                yield Place(path, text.line, "bake", name, text.value, variable_stem(name))
            case ("target", target, "args", name):
                yield Place(path, text.line, "bake", name, text.value, variable_stem(name), target)
            case ("target", _, *rest) if rest and rest[0] in ("contexts", "tags"):
                yield from image(path, text.line, text.value)


def bake_hcl(path: str, text: str) -> Iterator[Place]:
    """A bake file in HCL, read by python-hcl2."""
    from .hcl_tree import read_hcl_tree

    try:
        texts = read_hcl_tree(text)
    except RecursionError:
        raise
    except Exception as error:  # noqa: BLE001 -- lark's and python-hcl2's own errors share no base class
        raise NotUnderstood(f"not HCL: {str(error).splitlines()[0]}") from None
    yield from bake(path, texts)


def bake_json(path: str, text: str) -> Iterator[Place]:
    """A bake file in JSON, or another JSON file, which then holds no variable and no target."""
    texts, problems = read_json(text)
    if problems:
        raise NotUnderstood(f"not JSON: {problems[0][1]} (line {problems[0][0]})")
    yield from bake(path, texts)


def requirements(path: str, text: str) -> Iterator[Place]:
    """Pins and ranges of a requirements file; lines that are no requirement are pip's business."""
    for line, content in logical_lines(text):
        if content.startswith("-"):
            continue
        found = parse(re.split(r"\s-{1,2}\w", content, maxsplit=1)[0].strip(), path, line)
        if isinstance(found, Pin):
            yield from _requirement(found)


def pyproject(path: str, text: str) -> Iterator[Place]:
    """What a project builds with and depends on."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NotUnderstood(f"not TOML: {error}") from None
    lines = text.split("\n")
    project, groups = data.get("project", {}), data.get("dependency-groups", {})
    extras = project.get("optional-dependencies", {}) if isinstance(project, dict) else {}
    lists = [("", data.get("build-system", {}).get("requires", ())), ("", project.get("dependencies", ()))]
    lists += [(str(name), value) for table in (extras, groups) for name, value in table.items()]
    for group, entries in lists:
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, str):
                at = next((number for number, line in enumerate(lines, 1) if entry in line), 0)
                found = parse(entry, path, at)
                if isinstance(found, Pin):
                    yield from _requirement(found, group)


def _requirement(pin: Pin, group: str = "") -> Iterator[Place]:
    for said in address(pin.url) if pin.url else ():
        yield place(pin.path, pin.line, said, pin.marker or "")
    if pin.name is None or not pin.specifier:
        return
    version = pinned(pin.specifier)
    kind, value = ("range", pin.specifier) if version is None else ("pin", version)
    scope = " ".join(filter(None, (group, pin.marker)))
    yield Place(pin.path, pin.line, kind, pin.name, value, package_stem(pin.name), scope)
