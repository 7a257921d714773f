"""Pictures, drawn with matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onecrop.errors import from_extra
from onecrop.files import atomically, read_json_lines

NOT_CURVES = {"epoch", "step", "lr", "images_per_second", "seconds", "peak_memory", "data_wait"}


def _pyplot() -> Any:
    from_extra("matplotlib", "plots", "pictures need matplotlib").use("Agg")
    return from_extra("matplotlib.pyplot", "plots", "pictures need matplotlib")


def plot_curves(run: Path, path: Path) -> Path:
    """Every loss term and watched value of metrics.jsonl over the epochs, and probes from results.jsonl."""
    rows = read_json_lines(run / "metrics.jsonl")
    probes = [row for row in read_json_lines(run / "results.jsonl") if row.get("of") == "pretrained" and "step" in row]
    names = [name for name in (rows[0] if rows else {}) if name not in NOT_CURVES]
    panels = [(name, [r["epoch"] for r in rows], [r[name] for r in rows]) for name in names]
    for name in dict.fromkeys(row["evaluation"] for row in probes):
        mine = [row for row in probes if row["evaluation"] == name]
        panels.append((f"{name}, %", [r["epoch"] for r in mine], [r["accuracy"] for r in mine]))
    figure, axes = _row_of_axes(len(panels), 3.2, 2.8)
    for axis, (name, x, y) in zip(axes, panels, strict=False):
        axis.plot(x, y, marker="o", markersize=3, linewidth=1.5)
        axis.set(title=name.replace("_", " "), xlabel="epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    return _save(figure, path)


def plot_gallery(
    queries: NDArray[np.uint8],
    neighbours: NDArray[np.uint8],
    same: NDArray[np.bool_],
    path: Path,
    titles: Sequence[str],
) -> Path:
    """Each query [Q, 3, R, R] and its neighbours [Q, K, 3, R, R]; a neighbour of another class has a red frame."""
    plt = _pyplot()
    count, width = neighbours.shape[:2]
    figure, axes = plt.subplots(count, width + 1, figsize=(width + 1, count), squeeze=False)
    for row in range(count):
        for column in range(width + 1):
            picture = queries[row] if column == 0 else neighbours[row, column - 1]
            axis = axes[row, column]
            axis.imshow(picture.transpose(1, 2, 0))
            axis.set(xticks=[], yticks=[])
            wrong = column > 0 and not same[row, column - 1]
            for spine in axis.spines.values():
                spine.set(color="red" if wrong else "white", linewidth=3)
        axes[row, 0].set_ylabel(titles[row], rotation=0, ha="right", va="center")
    axes[0, 0].set_title("query", fontsize=9)
    axes[0, 1].set_title("nearest", fontsize=9)
    return _save(figure, path)


def plot_cost(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Accuracy against minutes, one point a method and backbone: the paper's first figure."""
    scores = list(dict.fromkeys(k for row in rows for k, v in row.items() if isinstance(v, tuple)))
    figure, axes = _row_of_axes(len(scores), 5, 4)
    for axis, score in zip(axes, scores, strict=False):
        groups: dict[str, list[Point]] = {row["backbone"]: [] for row in rows}
        for row in rows:
            if score in row:
                mean, spread = row[score]
                groups[row["backbone"]].append(Point(row["method"], row["minutes"], mean, spread or 0))
        _draw_named(axis, groups)
        axis.set(xlabel="minutes of pretraining", ylabel=f"{score}, %")
        axis.margins(0.15)
    return _save(figure, path)


COSTS = {"hours": "hours of pretraining here", "memory, MB": "MB of GPU memory at most"}  # columns of cells


def plot_cells_against_cost(cells: Sequence[dict[str, Any]], title: str, path: Path) -> Path:
    """The first score of every row against what it cost, a panel a cost; rows of one name differ by their marker."""
    by_row: dict[tuple[str, ...], dict[str, Any]] = {}
    for cell in cells:
        by_row.setdefault(tuple(cell["row"]), {})[cell["column"]] = cell["ours"]
    score = next(cell["column"] for cell in cells if cell["column"] not in COSTS)
    costs = [cost for cost in COSTS if any(values.get(cost) is not None for values in by_row.values())]
    figure, axes = _row_of_axes(len(costs), 5.5, 4.2)
    for axis, cost in zip(axes, costs, strict=False):
        groups: dict[str, list[Point]] = {", ".join(row[1:]): [] for row in by_row}
        for row, values in by_row.items():
            if None not in (values.get(cost), values.get(score)):
                groups[", ".join(row[1:])].append(Point(row[0], values[cost], values[score], 0))
        _draw_named(axis, groups)
        dearest = max(values[cost] for values in by_row.values() if values.get(cost) is not None)
        axis.set(xlabel=COSTS[cost], ylabel=f"{score}, %", xlim=(0, 1.3 * dearest))  # with room for the last name
        axis.margins(y=0.15)
    figure.suptitle(title)
    return _save(figure, path)


class Point(NamedTuple):
    name: str
    x: float
    y: float
    spread: float  # of y


def _draw_named(axis: Any, groups: Mapping[str, Sequence[Point]]) -> None:
    """Points with their names beside them, a marker a group."""
    for number, (label, points) in enumerate(groups.items()):
        x, y, spread = ([getattr(point, field) for point in points] for field in ("x", "y", "spread"))
        axis.errorbar(x, y, yerr=spread, fmt="osD^v"[number % 5], label=label, capsize=3 if any(spread) else 0)
        for point in points:
            axis.annotate(point.name, (point.x, point.y), xytext=(5, 4), textcoords="offset points", fontsize=9)
    axis.grid(alpha=0.3)
    if len(groups) > 1:
        axis.legend()


def plot_reproduction(cells: Sequence[dict[str, Any]], kind: str, head: str, title: str, path: Path) -> Path:
    """A figure of the paper from its cells: "line" (accuracy against the row's number, whose name is `head`) or
    "subsets" (against the number of images, a panel a backbone). Ours solid; the paper's hollow, where it prints some
    that ours can be compared with."""
    panels = _panels(cells, kind)
    shown = {"ours": {"marker": "o"}, "paper": {"marker": "o", "mfc": "none", "ls": ":"}}
    if all(cell["difference"] is None for cell in cells if cell["ours"] is not None):
        shown.pop("paper")
    figure, axes = _row_of_axes(len(panels), 4.2, 3.6)
    for axis, (name, lines) in zip(axes, panels.items(), strict=False):
        for number, (label, points) in enumerate(lines.items()):
            colour = f"C{number}"
            for key, look in shown.items():
                drawn = sorted((x, y[key], y["std"] or 0) for x, y in points.items() if y[key] is not None)
                if drawn:
                    x, y, spread = zip(*drawn, strict=True)
                    yerr = spread if key == "ours" and any(spread) else None
                    axis.errorbar(x, y, yerr, color=colour, label=f"{label}, {key}".strip(", "), **look)
        axis.set(title=name, xlabel={"line": head, "subsets": "images"}[kind], ylabel="accuracy, %")
        axis.set_xscale("log" if kind == "subsets" else "linear")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.suptitle(title)
    return _save(figure, path)


def _panels(cells: Sequence[dict[str, Any]], kind: str) -> dict[str, dict[str, dict[float, dict[str, Any]]]]:
    """Panel -> line -> x -> cell."""
    panels: dict[str, dict[str, dict[float, dict[str, Any]]]] = {}
    for cell in cells:
        row = tuple(cell["row"])
        if cell["column"] in COSTS:
            continue
        if kind == "subsets":
            panel, line, x = f"{row[0]} → {cell['column']}", row[1], row[2].replace(",", "")
        else:
            panel, line, x = "", "", row[0]
        panels.setdefault(panel, {}).setdefault(line, {})[float(x)] = cell
    return panels


def _row_of_axes(count: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure and its panels side by side, each of that size in inches; one, left empty, where there are none."""
    count = max(1, count)
    figure, axes = _pyplot().subplots(1, count, figsize=(width * count, height), squeeze=False, layout="constrained")
    return figure, axes[0]


def _save(figure: Any, path: Path) -> Path:
    try:
        with atomically(path) as temporary:
            figure.savefig(temporary, format=path.suffix.removeprefix("."), dpi=120, bbox_inches="tight")
    finally:
        _pyplot().close(figure)
    return path
