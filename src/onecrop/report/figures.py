"""Figures of the page, as plotly's JSON. Colours that depend on light or dark are set in the browser."""

import html
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from onecrop.errors import from_extra
from onecrop.report.plots import NOT_CURVES
from onecrop.report.reading import PictureMap, RunFolder

# Readable on white and on black, and apart from each other without red and green alone.
COLOURS = ("#3b82c4", "#e07b39", "#3a9d6e", "#c65b9c", "#8a6fc9", "#b58a2b", "#3aa6b0", "#d0565b", "#7c8796", "#7a9a3a")
MOST_CLASSES = 20  # with an entry of their own in the legend
CURVE_HEIGHT = 230  # px
HIGHLIGHT = "neighbours"  # the trace that the browser fills on a click


class Panel(NamedTuple):
    title: str  # HTML
    figure: str  # JSON
    height: int  # px; room is kept before it is drawn, so that nothing moves when it is


class Line(NamedTuple):
    run: int
    x: Sequence[float]
    y: Sequence[float]


def plotly() -> Any:
    return from_extra("plotly.graph_objects", "report", "the page is drawn by plotly")


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def curves(runs: Sequence[RunFolder], names: Sequence[str]) -> list[Panel]:
    """A panel for every loss term and watched value, for every probe on the way, and for what steps cost."""
    panels = [panel for key in _keys(runs, NOT_CURVES) for panel in _by_axis(_title(key), runs, key, names)]
    for evaluation in dict.fromkeys(row["evaluation"] for run in runs for row in run.probes):
        panels.append(_lines(f"{evaluation}, %", "epoch", list(_scores(runs, evaluation, minutes=False)), names))
        by_time = list(_scores(runs, evaluation, minutes=True))
        if by_time:
            panels.append(_lines(f"{evaluation}, % over the cost", "minutes of training", by_time, names))
    for key, title in (("lr", "learning rate"), ("images_per_second", "images a second")):
        panels += _by_axis(title, runs, key, names)
    return panels


def _by_axis(title: str, runs: Sequence[RunFolder], key: str, names: Sequence[str]) -> Iterator[Panel]:
    """Pretraining counts epochs and detection steps: what both have is drawn twice, not on one axis."""
    for axis in ("epoch", "step"):
        lines = list(_values(runs, key, axis))
        if lines:
            yield _lines(title, axis, lines, names)


def _title(key: str) -> str:
    return "instance accuracy" if key == "accuracy" else key.replace("_", " ")


def _keys(runs: Sequence[RunFolder], but: set[str]) -> list[str]:
    numbers = (
        key
        for run in runs
        for row in run.metrics
        for key, value in row.items()
        if key not in but and isinstance(value, int | float) and not isinstance(value, bool)
    )
    return list(dict.fromkeys(numbers))


def _values(runs: Sequence[RunFolder], key: str, axis: str) -> Iterator[Line]:
    for number, run in enumerate(runs):
        rows = [row for row in run.metrics if isinstance(row.get(key), int | float)]
        rows = [row for row in rows if axis == ("epoch" if "epoch" in row else "step")]
        if rows:
            yield Line(number, [row[axis] for row in rows], [row[key] for row in rows])


def _scores(runs: Sequence[RunFolder], evaluation: str, minutes: bool) -> Iterator[Line]:
    for number, run in enumerate(runs):
        rows = [row for row in run.probes if row["evaluation"] == evaluation]
        spent = dict(
            zip(
                (row.get("epoch") for row in run.metrics),
                itertools.accumulate(row.get("seconds", 0) / 60 for row in run.metrics),
                strict=True,
            )
        )
        if minutes:
            rows = [row for row in rows if row["epoch"] in spent]
        if rows:
            x = [spent[row["epoch"]] if minutes else row["epoch"] for row in rows]
            yield Line(number, x, [row["accuracy"] for row in rows])


def _lines(title: str, axis: str, lines: Sequence[Line], names: Sequence[str]) -> Panel:
    objects = plotly()
    figure = objects.Figure()
    for run, x, y in lines:
        figure.add_scatter(
            x=list(x),
            y=list(y),
            name=html.escape(names[run], quote=False),  # plotly reads tags in names
            mode="lines+markers" if len(x) < 40 else "lines",
            marker={"size": 5},
            line={"color": colour(run), "width": 2},
        )
    few = axis == "epoch" and max((max(line.x) for line in lines), default=0) <= 10  # no ticks between epochs
    figure.update_layout(
        template="none",
        showlegend=False,
        hovermode="x unified",
        margin={"l": 52, "r": 12, "t": 8, "b": 40},
        height=CURVE_HEIGHT,
        xaxis={"title": {"text": axis}, "fixedrange": True, "automargin": True, "dtick": 1 if few else None},
        yaxis={"fixedrange": True, "automargin": True, "exponentformat": "power"},
    )
    return Panel(html.escape(title), _json(figure), CURVE_HEIGHT)


def scatter(found: PictureMap, title: str, height: int) -> Panel:
    """The map: a dot a picture, `customdata` its number; a class a trace where there are not too many."""
    objects = plotly()
    figure = objects.Figure()
    classes = found.facts["classes"]
    groups: list[tuple[str, Any, Any]] = [("", np.arange(len(found)), colour(0))]
    if classes and len(classes) <= MOST_CLASSES:
        groups = [
            (str(c), np.flatnonzero(found.labels == i), class_colour(i, len(classes))) for i, c in enumerate(classes)
        ]
    elif classes:
        groups = [("", np.arange(len(found)), [class_colour(i, len(classes)) for i in found.labels])]
    for label, rows, shade in groups:
        places = found.places[rows]
        figure.add_scatter(
            x=places[:, 0],
            y=places[:, 1],
            customdata=rows.astype(np.int32),
            name=html.escape(label, quote=False),
            mode="markers",
            hoverinfo="none",  # the browser shows the picture instead
            marker={"size": 5 if len(found) > 1500 else 7, "color": shade, "opacity": 0.75},
        )
    ring = {"size": 15, "color": "rgba(0,0,0,0)", "line": {"width": 2}}
    figure.add_scatter(x=[], y=[], mode="markers", name=HIGHLIGHT, hoverinfo="skip", showlegend=False, marker=ring)
    blank = {"visible": False, "automargin": False}
    figure.update_layout(
        template="none",
        margin={"l": 4, "r": 4, "t": 4, "b": 4},
        xaxis=blank,
        yaxis=blank | {"scaleanchor": "x"},
        hovermode="closest",
        showlegend=len(groups) > 1,
        legend={"orientation": "h", "y": -0.02, "yanchor": "top", "itemsizing": "constant", "font": {"size": 11}},
        height=height,
    )
    return Panel(title, _json(figure), height)


def class_colour(number: int, count: int) -> str:
    """The fixed colours as far as they go, else hues at equal distances."""
    return colour(number) if count <= len(COLOURS) else f"hsl({360 * number / count:.0f},60%,{(50, 62)[number % 2]}%)"


def _json(figure: Any) -> str:
    return json.dumps(json.loads(figure.to_json()), separators=(",", ":"))
