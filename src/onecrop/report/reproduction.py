"""A reproduced table beside the paper's numbers: Markdown to read, CSV and JSON with all that each cell depends on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onecrop.errors import UserError
from onecrop.files import write_atomically, write_json
from onecrop.report.plots import plot_cells_against_cost, plot_reproduction
from onecrop.report.tables import csv_text, markdown_table

Row = dict[str, Any]


KINDS = {"pretraining": "pretrain h", "probes": "probes h", "detection": "detect h"}  # of work -> head of its hours
WIDE = 120  # characters of a line of the plan


def plan_text(rows: Sequence[Row], differences: Sequence[str], device: str) -> str:
    """The plan for a terminal. Hours of a kind of work that a run has nothing to do of are not there."""
    kinds = [kind for kind in KINDS if any(kind in row["hours"] for row in rows)]
    table = [["run", "data", "images", "epochs", *(KINDS[kind] for kind in kinds), "state"]]
    for row, name in zip(rows, _shortened([row["run"] for row in rows]), strict=True):
        images = f"{row['images']:,}" if row.get("images") else "?" if "data" in row else "–"
        cells = [name, Path(row.get("data", "–")).name, images, str(row.get("epochs", "–"))]
        cells += [hours_text(row["hours"][kind]) if kind in row["hours"] else "–" for kind in kinds]
        table.append([*cells, row["state"]])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for first, data, *numbers, state in table:
        right = (f"{cell:>{width}}" for cell, width in zip(numbers, widths[2:-1], strict=True))
        lines.append("  ".join([f"{first:<{widths[0]}}", f"{data:<{widths[1]}}", *right, state]))
    left = [row["hours"] for row in rows if row["state"] != "finished"]
    unknown = sum(None in hours.values() for hours in left)
    sums = {kind: sum(hours.get(kind) or 0 for hours in left) for kind in kinds}
    if any(sums.values()):
        more = f", {unknown} of them not forecast in full" if unknown else ""
        parts = " + ".join(f"{hours_text(value)} of {kind}" for kind, value in sums.items())
        more += f": {hours_text(sum(sums.values()))} hours on {device}, from a few steps of each kind: {parts}"
    else:
        more = "; --plan times a few steps of each kind on this device, and says how long they take" if unknown else ""
    lines.append(f"{len(left)} runs to do{more}")
    if sums.get("detection"):
        lines.append("detection is timed on smaller pictures with fewer crops where a step takes long, and scaled")
    lines += [f"not as in the paper: {difference}" for difference in differences]
    return "\n".join(lines)


def _shortened(names: Sequence[str]) -> list[str]:
    """Long ones without what they all end in."""
    parts, shared = [name.split("-") for name in names], 0
    if len(names) > 1 and max(map(len, names)) > WIDE // 2:
        while all(len(part) > shared + 1 and part[-1 - shared] == parts[0][-1 - shared] for part in parts):
            shared += 1
    return ["-".join([*part[:-shared], "…"]) for part in parts] if shared else list(names)


def hours_text(hours: float | None) -> str:
    if hours is None:
        return "?"
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 1 else f"{hours:.2g}"


def write_reproduction(
    folder: Path, name: str, facts: Row, heads: Sequence[str], cells: Sequence[Row], picture: str
) -> Path:
    """NAME.md, .csv and .json in `folder` and, where the paper has a figure, NAME.png -> the Markdown file."""
    rows = wide(heads, cells)
    lines = [
        f"# {facts['title']}",
        "",
        f"{facts['date']}, {facts['device']}, torch {facts['torch']}, scale {facts['scale']:g}.",
    ]
    lines += [*facts["notes"], *(["", "Not as in the paper:", ""] if facts["differences"] else [])]
    lines += [f"- {difference}" for difference in facts["differences"]]
    lines += ["", f"    {facts['command']}", "", table(rows), "", LEGEND, ""]
    for cell in cells:
        if cell["failure"]:
            lines.append(f"- {' '.join(cell['row'])}, {cell['column']}: failed: {cell['failure']}")
    write_atomically(folder / f"{name}.md", "\n".join(lines).encode("utf-8", "backslashreplace"))
    write_atomically(folder / f"{name}.csv", as_csv(heads, cells, facts["scale"]).encode("utf-8", "backslashreplace"))
    write_json(folder / f"{name}.json", {**facts, "heads": list(heads), "rows": rows, "cells": list(cells)})
    if picture in ("cost", "line", "subsets") and any(cell["ours"] is not None for cell in cells):
        try:
            if picture == "cost":
                plot_cells_against_cost(cells, facts["title"], folder / f"{name}.png")
            else:
                plot_reproduction(cells, picture, heads[0], facts["title"], folder / f"{name}.png")
        except UserError as error:  # without matplotlib the tables are still worth having
            print(f"no picture: {error}")
    return folder / f"{name}.md"


LEGEND = (
    "Ours, then in brackets the paper's number and the difference. † the paper quotes it from others; not run here. "
    "No difference where another data set or backbone stands for the paper's. "
    "– not run yet. Hours and memory are of other hardware than the paper's."
)


def wide(heads: Sequence[str], cells: Sequence[Row]) -> list[Row]:
    """A line a row of the paper's table, a column a measurement."""
    rows: dict[tuple[str, ...], Row] = {}
    for cell in cells:
        key = tuple(cell["row"])
        rows.setdefault(key, dict(zip(heads, key, strict=True)))[cell["column"]] = cell_text(cell)
    return list(rows.values())


def cell_text(cell: Row) -> str:
    if cell["quoted"]:
        return f"{cell['paper']:g} †"
    ours = "failed" if cell["failure"] and cell["ours"] is None else "–" if cell["ours"] is None else _number(cell)
    if cell["paper"] is None:
        return ours
    difference = f", {cell['difference']:+.1f}".replace("-", "−") if cell["difference"] is not None else ""
    return f"{ours} ({cell['paper']:g}{difference})"


def _number(cell: Row) -> str:
    if cell["column"] == "hours":
        return hours_text(cell["ours"])
    return f"{cell['ours']:.1f}" + (f" ± {cell['std']:.1f}" if cell["std"] is not None else "")


def table(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return markdown_table(names, ([row.get(name, "") for name in names] for row in rows))


def as_csv(heads: Sequence[str], cells: Sequence[Row], scale: float) -> str:
    """A line a cell, with all that it depends on."""
    return csv_text(
        {**dict(zip(heads, cell["row"], strict=True)), **{k: v for k, v in cell.items() if k != "row"}, "scale": scale}
        for cell in cells
    )
