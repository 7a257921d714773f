"""Sections of the page as HTML. Every text that comes from a run is escaped: folders may be called anything."""

import html
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from onecrop.files import printable
from onecrop.progress import duration, readable
from onecrop.report.card import KIND
from onecrop.report.comparison import is_own_score
from onecrop.report.figures import Panel, colour
from onecrop.report.reading import PictureMap, Row, RunFolder

QUERIES = 10  # of the gallery
MOST_PAIRS = 40  # of near-duplicates shown


def escape(value: Any) -> str:
    return html.escape(printable(str(value)))


def run_name(number: int, name: str) -> str:
    return f'<span class="swatch" style="background:{colour(number)}"></span>{escape(name)}'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kinds: Sequence[str], marked: Sequence[bool] = ()) -> str:
    """Cells are HTML; kinds: a CSS class a column."""
    titles = "".join(f'<th class="{kind}">{escape(name)}</th>' for name, kind in zip(head, kinds, strict=True))
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(f'<td class="{kind}">{cell}</td>' for cell, kind in zip(row, kinds, strict=True))
        lines.append(f"<tr{' class=differs' if number < len(marked) and marked[number] else ''}>{cells}</tr>")
    return (
        f'<div class="card scroll"><table><thead><tr>{titles}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def overview(runs: Sequence[RunFolder], names: Sequence[str]) -> str:
    """What was run, what it cost, what it scores: a row a run."""
    last = [_last_scores(run) for run in runs]
    evaluations = list(dict.fromkeys(name for scores in last for name in scores))
    head = ["run", "method", "backbone", "data", "images", "px", "epochs", "training", "images/s", "memory"]
    rows = []
    for number, (run, name, scores) in enumerate(zip(runs, names, last, strict=True)):
        cells = [run_name(number, name), *(escape(run.recipe.get(key, "–")) for key in ("method", "backbone", "data"))]
        cells += [_number(run.provenance.get("num_images")), escape(run.recipe.get("image_size", "–")), _epochs(run)]
        cells += _cost(run)
        cells += [f"{scores[key]:.1f}" if key in scores else "–" for key in evaluations]
        rows.append(cells)
    kinds = ["run", "run", "run", "text", *["number"] * (6 + len(evaluations))]
    return table([*head, *(f"{name}, %" for name in evaluations)], rows, kinds)


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


def _epochs(run: RunFolder) -> str:
    wanted = run.recipe.get("epochs", "–")
    if run.finished or not run.metrics:
        return escape(wanted)
    return escape(f"{run.metrics[-1].get('epoch', '?')} of {wanted}")


def _cost(run: RunFolder) -> list[str]:
    rates = [row["images_per_second"] for row in run.metrics if "images_per_second" in row]
    memory = [row["peak_memory"] for row in run.metrics if row.get("peak_memory")]
    spent = duration(run.seconds) if run.seconds else "–"
    return [spent, f"{statistics.median(rates):,.0f}" if rates else "–", readable(max(memory)) if memory else "–"]


def _last_scores(run: RunFolder) -> dict[str, float]:
    """Of the finished run on its own data, all labels and its input size; before that, of the last probe on the way."""
    scored = [row for row in run.results if row.get("of") == "pretrained" and "accuracy" in row]
    own = [row for row in scored if is_own_score(row, run.recipe)] or run.probes
    return {row["evaluation"]: float(row["accuracy"]) for row in own}


def notes(runs: Sequence[RunFolder], names: Sequence[str]) -> str:
    lines = (
        f'<p class="note">{escape(name)}: {escape(note)}</p>'
        for run, name in zip(runs, names, strict=True)
        for note in run.notes
    )
    return "".join(lines)


def probes(runs: Sequence[RunFolder], names: Sequence[str]) -> str:
    """The last score of each kind; fine-tuning with few labels and detection below it."""
    rows = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        last = {
            tuple(row.get(key) for key in KIND): row for row in run.results if "step" not in row and "accuracy" in row
        }
        for row in last.values():
            how = f"{row.get('protocol', '')}; {row.get('split', '')}"
            fed = f"{row['image_size']} px: {row['resize']}; " if "resize" in row else ""
            of, evaluation, data = (escape(row.get(key, "–")) for key in ("of", "evaluation", "data"))
            score = f"{row['accuracy']:.1f}"  # in front, where a phone shows it
            rows.append([run_name(number, name), evaluation, score, data, of, escape(fed + how)])
    kinds = ["run", "run", "number", "text", "run", "long"]
    parts = [table(["run", "evaluation", "%", "data", "features", "input and protocol"], rows, kinds)] if rows else []
    return "".join([*parts, _shares(runs, names), _detection(runs, names)])


def _shares(runs: Sequence[RunFolder], names: Sequence[str]) -> str:
    rows = [
        [
            run_name(number, name),
            escape(row["of"]),
            escape(row["data"]),
            f"{row['num_labels']:,}",
            f"{row['accuracy']:.1f}",
        ]
        for number, (run, name) in enumerate(zip(runs, names, strict=True))
        for row in run.shares
    ]
    kinds = ["run", "run", "text", "number", "number"]
    return "<h3>Few labels</h3>" + table(["run", "way", "data", "labels", "%"], rows, kinds) if rows else ""


def _detection(runs: Sequence[RunFolder], names: Sequence[str]) -> str:
    rows = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        last = {(row["evaluation"], row["metric"]): row for row in run.results if "AP" in row}  # scored again: once
        for row in last.values():
            shrunk = f"schedule {row['schedule']} × {row['scale']:g}, size × {row['size_scale']:g}"
            start = row["of"] if row["of"] == "scratch" else f"{row['of']} weights"
            said = f"{row['set']}, {row['metric']} AP; from {start}; {shrunk}"
            scores = [f"{row[key]:.1f}" for key in ("AP50", "AP", "AP75")]
            rows.append([run_name(number, name), escape(row["evaluation"]), *scores, escape(said)])
    kinds = ["run", "run", "number", "number", "number", "long"]
    return "<h3>Detection</h3>" + table(["run", "what", "AP50", "AP", "AP75", "how"], rows, kinds) if rows else ""


def graph(identity: str, panel: Panel, meta: str = "") -> str:
    """A card with room for a figure; its JSON stands beside it, and the browser draws it."""
    figure = panel.figure.replace("<", "\\u003c")
    return (
        f'<div class="card"><h3>{panel.title}</h3>{meta}'
        f'<div class="graph" id="{identity}" style="min-height:{panel.height}px"></div>'
        f'<script type="application/json" id="{identity}-figure">{figure}</script></div>'
    )


def map_meta(found: PictureMap) -> str:
    asked = found.facts["asked"]
    part = "the test part of " if asked["part"] == "test" else ""
    said = f"{len(found):,} pictures of {part}{asked['data']}; {found.facts['method']}, {found.facts['seconds']:.0f} s"
    return f"<small>{escape(said)}</small>"


def gallery(sets: Sequence[PictureMap]) -> str:
    """The same queries through every run: a picture of each class, or pictures at equal distances in the set."""
    blocks = [
        f'<div class="query-block" data-set="{number}" data-query="{row}"></div>'
        for number, found in enumerate(sets)
        for row in queries(found)
    ]
    return f'<div class="card gallery">{"".join(blocks)}</div>'


def queries(found: PictureMap) -> list[int]:
    classes = np.unique(found.labels[found.labels >= 0])
    if len(classes):
        shown = classes[np.linspace(0, len(classes) - 1, min(QUERIES, len(classes))).astype(int)]
        return [int(np.flatnonzero(found.labels == label)[0]) for label in shown]
    return list(map(int, np.unique(np.linspace(0, len(found) - 1, min(QUERIES, len(found))).astype(int))))


def repeats(sets: Sequence[PictureMap]) -> str:
    """Pictures that look like an earlier one, the likest to the backbone first."""
    parts = []
    for number, found in enumerate(sets):
        order = np.argsort(-found.repeat_cosines, kind="stable")
        where = escape(found.facts["asked"]["data"])
        count = len(order)
        shown = f"; the {MOST_PAIRS} nearest are shown" if count > MOST_PAIRS else ""
        parts.append(f"<p>{count:,} of the {len(found):,} pictures of {where} look like an earlier one{shown}.</p>")
        pairs = []
        for pair in order[:MOST_PAIRS]:
            two = "".join(f'<i data-set="{number}" data-picture="{row}"></i>' for row in found.repeats[pair])
            pairs.append(f'<div class="pair">{two}<br>cosine {found.repeat_cosines[pair]:.3f}</div>')
        parts.append(f'<div class="pairs">{"".join(pairs)}</div>')
    return "".join(parts)


def recipes(runs: Sequence[RunFolder], names: Sequence[str]) -> str:
    return _side_by_side([run.recipe for run in runs], names, [])


def provenances(runs: Sequence[RunFolder], names: Sequence[str]) -> str:
    flat = []
    for run in runs:
        row = {key: value for key, value in run.provenance.items() if not isinstance(value, dict)}
        versions = run.provenance.get("versions")
        flat.append(row | ({f"version of {k}": v for k, v in versions.items()} if isinstance(versions, dict) else {}))
    return _side_by_side(flat, names, ["date", "command"])


def _side_by_side(columns: Sequence[Row], names: Sequence[str], plain: Sequence[str]) -> str:
    """A line a field; those in which runs differ are marked, but for `plain` ones, which always do."""
    fields = list(dict.fromkeys(key for column in columns for key in column))
    values = [[column.get(key) for column in columns] for key in fields]
    rows = [
        [escape(key.replace("_", " ")), *("–" if value is None else escape(value) for value in row)]
        for key, row in zip(fields, values, strict=True)
    ]
    marked = [key not in plain and len(set(map(str, row))) > 1 for key, row in zip(fields, values, strict=True)]
    return table(["", *names], rows, ["run", *["text"] * len(columns)], marked)
