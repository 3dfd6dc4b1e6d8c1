"""report.html: one file without scripts that needs no network, for screens light and dark, phones and paper.

Each plot stands beside a table of the same figures, which is its text alternative.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import run
from .facts import Facts

if TYPE_CHECKING:
    from pygal.graph.graph import Graph

TEMPLATE = "report.html.j2"
_COLOURS = ("#c8643c", "#3a7ca5", "#8a9a5b", "#b08bbf", "#d9a441", "#5aa9a0", "#99756b", "#7d8ca3")
_ASKED = ("first request", "decode", "sampled request")  # after the server was ready: no part of its start
_PART = "of it "  # begins the name of a part of the phase before it: in the table, not in the plot


def size(count: float) -> str:
    """Bytes for people."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def page(facts: Facts) -> str:
    """The whole file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["size"] = size
    return environment.get_template(TEMPLATE).render(
        facts=facts,
        phases=phases(facts.starts),
        plots={
            "starts": _starts(facts.starts),
            "caches": _caches(facts),
            "tuned": _tuned(facts),
            "steps": _bars(list(facts.steps.items()), "steps", "s"),
        },
        docker=run.docker(facts),
        kubernetes=run.kubernetes(facts),
    )


def phases(starts: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The names of all phases, in order; `ready`, which is their sum, and requests are none."""
    return list(dict.fromkeys(name for one in starts.values() for name in one if name not in ("ready", *_ASKED)))


def _plot(kind: str, rows: int, unit: str, **options: Any) -> Graph:  # noqa: ANN401 - pygal's options
    import pygal
    from pygal.style import Style

    # Its finder of plugins, of which we have none, knows no `find_spec`: every later import of the process would warn.
    sys.meta_path[:] = [one for one in sys.meta_path if type(one).__module__ != "pygal"]
    ink, clear, text = "currentColor", "transparent", 13
    style = Style(
        background=clear, plot_background=clear, foreground=ink, foreground_strong=ink, colors=_COLOURS, opacity="1",
        font_family="inherit", label_font_size=text, major_label_font_size=text, legend_font_size=text,
    )  # fmt: skip
    made: Graph = getattr(pygal, kind)(
        style=style, js=(), disable_xml_declaration=True, width=760, height=110 + 34 * rows,
        legend_at_bottom=True, legend_at_bottom_columns=3, legend_box_size=11, truncate_legend=-1,
        margin=4, value_formatter=lambda value: f"{value:g} {unit}", **options,
    )  # fmt: skip
    return made


def _room_for_legend(plot: Graph, names: int) -> None:
    """Show all lines of the legend, of three names each: pygal leaves room for the first."""
    plot.margin_bottom = 4 + 21 * ((names - 1) // 3)


def _drawn(plot: Graph, name: str) -> str:
    """The SVG element, without pygal's script, and the same text for the same figures: no random id, no date."""
    plot.uuid = name
    svg: str = plot.render(is_unicode=True)
    return re.sub(r"<!--.*?-->|<script.*?</script>", "", svg, flags=re.DOTALL)


def _starts(starts: Mapping[str, Mapping[str, float]]) -> str:
    if not starts:
        return ""
    order = list(starts)[::-1]  # horizontal bars are drawn from below
    plot = _plot("HorizontalStackedBar", len(starts), "s")
    plot.x_labels = order
    shown = [name for name in phases(starts) if not name.startswith(_PART)]
    _room_for_legend(plot, len(shown))
    for name in shown:
        plot.add(name, [starts[one].get(name, 0.0) for one in order])
    return _drawn(plot, "starts")


def _caches(facts: Facts) -> str:
    known = [one for one in facts.caches if one.bytes]
    if len(known) < 2:
        return ""
    return _bars([(one.kind, one.bytes / 1e6) for one in known], "caches", "MB")


def _bars(rows: Sequence[tuple[str, float]], name: str, unit: str) -> str:
    if not rows:
        return ""
    plot = _plot("HorizontalBar", len(rows), unit, show_legend=False)
    plot.x_labels = [label for label, _ in reversed(rows)]
    plot.add("", [value for _, value in reversed(rows)])
    return _drawn(plot, name)


def _tuned(facts: Facts) -> str:
    """Time saved against the default in percent, by op and bucket, with its confidence interval."""
    compared = [row for row in facts.tuned if row.ratio is not None]
    if all(row.ratio == 1 for row in compared):
        return ""
    buckets = sorted({row.bucket for row in compared})
    plot = _plot("Bar", 8, "%", x_label_rotation=30 if len(buckets) > 14 else 0)
    plot.x_labels = [str(bucket) for bucket in buckets]
    ops = list(dict.fromkeys(row.op for row in compared))
    _room_for_legend(plot, len(ops))
    bars = {op: [_saved(row for row in compared if (row.op, row.bucket) == (op, one)) for one in buckets] for op in ops}
    ends = [end for row in bars.values() for one in row if one for end in one["ci"].values()]
    plot.range = min([0.0, *ends]), max([0.0, *ends])
    for op, row in bars.items():
        plot.add(op, row)
    return _drawn(plot, "tuned")


def _saved(rows: Iterable[Any]) -> dict[str, Any] | None:
    """One bar: the mean over the entries of an op at a bucket; None where the default won or nothing was compared."""
    found = list(rows)
    if all(row.ratio == 1 for row in found):
        return None
    value = 100 * (1 - statistics.fmean(row.ratio for row in found))
    spread = 100 * max(row.spread or 0.0 for row in found)
    return {"value": value, "ci": {"low": value - spread, "high": value + spread}}
