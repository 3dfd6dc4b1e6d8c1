"""Templates to files: pure, no clock, no environment, no network. `render` keeps Jinja2 within bounds.

templates/Dockerfile.j2             -> docker/Dockerfile
templates/requirements/host.txt.j2  -> requirements/host.txt
templates/_name.j2                  a part that other templates include, rendered to nothing itself

A template directly below templates/ is rendered into docker/, one in a folder into the same folder of the tree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from .findings import Finding, near
from .source import FILE, Versions, WrittenInvalid
from .tree import Tree, Unreadable

if TYPE_CHECKING:
    from jinja2 import Environment, nodes


FOLDER = "templates"
END = ".j2"


class TemplatesInvalid(WrittenInvalid):
    """A template cannot be rendered; the findings are those on all of them."""

    subject, remedy = f"{FOLDER}/", f"correct {FOLDER}/ or {FILE}, then run `pipeline versions sync`"


Files = dict[str, bytes]
Uses = dict[str, tuple[tuple[str, int], ...]]  # name -> (template, line), ...


class Rendered(NamedTuple):
    """Every file that the templates give, by its path in the tree, and where each name stands in the templates."""

    files: Files
    uses: Uses


def has_templates(root: Path) -> bool:
    """Whether a tree renders anything; one that does not may still be checked."""
    return (root / FOLDER).is_dir()


def target(template: str) -> str:
    """The path in the tree that a template (relative to templates/) is rendered to."""
    path = template.removesuffix(END)
    return path if "/" in path else f"docker/{path}"


# What Jinja2 itself defines inside loops, macros and blocks.
_GIVEN = frozenset({"loop", "caller", "varargs", "kwargs", "self", "super"})


def fill(inside: Tree, versions: Versions, tell: Callable[[str], None]) -> Rendered:
    """Render all templates in memory; raise `TemplatesInvalid` with every problem of every template.

    A variable without a version is an error here; a version that no template uses is one too, since a name that
    reaches nothing only looks managed. `tell` is given the path of each template in its turn.
    """
    from jinja2 import FunctionLoader, StrictUndefined, Template, TemplateError, TemplateNotFound, TemplateSyntaxError
    from jinja2.loaders import split_template_path
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    root = inside.root

    def text(name: str) -> str | None:
        """What a template holds, None where there is none; nothing outside the tree is read."""
        path = "/".join([FOLDER, *split_template_path(name)])
        return inside.read(path).decode() if os.path.lexists(root / path) else None

    codes: dict[str, CodeType] = {}

    class Compiled(FunctionLoader):
        """Gives parts as they were compiled in their own turn, which comes first."""

        def load(
            self, environment: Environment, name: str, globals: MutableMapping[str, Any] | None = None
        ) -> Template:
            if name not in codes:
                return super().load(environment, name, globals)
            return Template.from_code(environment, codes[name], {} if globals is None else globals)

    environment = ImmutableSandboxedEnvironment(
        loader=Compiled(text),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    findings: list[Finding] = []
    uses: dict[str, list[tuple[str, int]]] = {}
    files: dict[str, bytes] = {}
    for name in _templates(root / FOLDER):
        place = f"{FOLDER}/{name}"
        tell(place)
        try:
            tree = environment.parse(inside.read(place).decode(), name)
            unknown = _names(environment, tree, place, versions, uses)
            findings += [
                Finding(place, line, 0, f"{word} has no version in {FILE}{near(word, versions)}", "render")
                for word, line in unknown
            ]
            if unknown:
                continue
            codes[name] = environment.compile(tree, name, str(root / FOLDER / name))  # what was parsed, not anew
            if not _is_part(name):
                template = Template.from_code(environment, codes[name], environment.make_globals(None))
                files[target(name)] = template.render(dict(versions)).encode()
        except TemplateSyntaxError as error:
            where = f"{FOLDER}/{error.name}" if error.name else place
            findings.append(Finding(where, error.lineno, 0, f"not a template: {error.message}", "render"))
        except TemplateNotFound as error:
            findings.append(Finding(place, 0, 0, f"cannot be rendered: there is no {error.name}", "render"))
        except Unreadable as error:
            findings.append(error.finding)
        except RecursionError:
            message = "cannot be rendered: it includes itself, or is nested too deeply"
            findings.append(Finding(place, 0, 0, message, "render"))
        except UnicodeDecodeError:
            findings.append(Finding(place, 0, 0, "is not UTF-8", "render"))
        except OSError as error:
            findings.append(Finding(place, 0, 0, f"cannot be read: {error.strerror}", "render"))
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            findings.append(Finding(place, 0, 0, f"cannot be rendered: {error}", "render"))
    reached = versions.closure(uses)
    findings += [
        Finding(FILE, versions.variables[name].line, 0, f"{name} reaches no template", "render")
        for name in versions
        if name not in reached
    ]
    if findings:
        raise TemplatesInvalid(sorted(set(findings)))
    return Rendered(files, {name: tuple(places) for name, places in uses.items()})


def _is_part(name: str) -> bool:
    """Whether a template is there for others to include."""
    return name.rpartition("/")[2].startswith("_")


def _templates(folder: Path) -> list[str]:
    """Every template below a folder, and what no tree should hold there, a FIFO say, so that reading it says so."""
    names = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.name.endswith(END) or not (path.is_symlink() or path.is_file() or path.is_dir())
    ]
    return sorted(names, key=lambda name: (not _is_part(name), name))


def _names(
    environment: Environment,
    tree: nodes.Template,
    place: str,
    versions: Versions,
    uses: dict[str, list[tuple[str, int]]],
) -> list[tuple[str, int]]:
    """Add where managed names stand in one template to `uses`; return the `(name, line)` that have no version."""
    from jinja2 import nodes

    found = list(tree.find_all(nodes.Name))
    own = {node.name for node in found if node.ctx != "load"} | set(environment.globals) | _GIVEN  # loops, set
    own |= {macro.name for macro in tree.find_all(nodes.Macro)} | {one.target for one in tree.find_all(nodes.Import)}
    for one in tree.find_all(nodes.FromImport):
        own |= {name if isinstance(name, str) else name[1] for name in one.names}
    unknown = []
    for node in found:
        if node.name in versions:
            uses.setdefault(node.name, []).append((place, node.lineno))
        elif node.name not in own:
            unknown.append((node.name, node.lineno))
    return unknown
