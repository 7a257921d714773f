"""One table of a comparison, from its run folders: Markdown, CSV, LaTeX and a picture of accuracy against cost."""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from onecrop.errors import UserError
from onecrop.files import read_json, read_json_lines, write_atomically, write_json
from onecrop.report.plots import plot_cost
from onecrop.report.tables import csv_text, markdown_table

PLAN = "plan.json"  # folder name of each member -> its recipe
FAILURE = "failure.txt"  # in a member's folder: why it has no result

Row = dict[str, Any]


def add_to_plan(folder: Path, members: dict[str, Any]) -> None:
    """Folder name -> recipe of every member, those of earlier calls included."""
    earlier = read_plan(folder) if (folder / PLAN).exists() else {}
    write_json(folder / PLAN, {**earlier, **members})


def read_plan(folder: Path) -> dict[str, Any]:
    try:
        plan = json.loads((folder / PLAN).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / PLAN} cannot be read: {error}") from None
    return plan if isinstance(plan, dict) else {}


def write_comparison(folder: Path) -> Path:
    """Read every run below `folder` and write comparison.{md,csv,tex,json,png} there -> the Markdown file."""
    rows = collect(folder)
    write_atomically(folder / "comparison.md", markdown(rows).encode())
    write_atomically(folder / "comparison.csv", as_csv(rows).encode())
    write_atomically(folder / "comparison.tex", latex(rows).encode())
    write_json(folder / "comparison.json", {**_facts(folder), "rows": rows})
    scored = [row for row in rows if row.get("minutes")]
    if scored:
        try:
            plot_cost(scored, folder / "comparison.png")
        except UserError as error:  # without matplotlib the tables are still worth having
            print(f"no picture: {error}")
    return folder / "comparison.md"


def _facts(folder: Path) -> Row:
    """What the rows of a published table need beside them, from the first run that began."""
    for begun in filter(None, map(read_json, sorted(folder.glob("*/provenance.json")))):
        return {
            "title": folder.name,
            "command": begun["command"],
            "date": begun["date"][:10],
            "device": begun["device"],
            "torch": begun["versions"]["torch"],
            "notes": _protocols(folder),
        }
    return {"title": folder.name}


def _protocols(folder: Path) -> list[str]:
    """How the scores of the table were taken: a line an evaluation."""
    files = sorted(folder.glob("*/recipe.json"))
    rows = [row for file in files if (recipe := read_json(file)) for row in _own_scores(file.parent, recipe)]
    return sorted({f"{row['evaluation']} ({row['data']}, {row['split']}): {row['protocol']}." for row in rows})


def collect(folder: Path) -> list[Row]:
    """One row a recipe, over its seeds; fields in which recipes of one method differ are columns."""
    plan = read_plan(folder)
    flat = {name: _flat(recipe) for name, recipe in plan.items()}
    groups: dict[str, list[str]] = defaultdict(list)
    for name, recipe in flat.items():
        groups[json.dumps(recipe, sort_keys=True)].append(name)
    rows = []
    for names in groups.values():
        first = flat[names[0]]
        alike = [recipe for recipe in flat.values() if recipe["method"] == first["method"]]
        varied = [key for key in first if key != "backbone" and len({str(recipe.get(key)) for recipe in alike}) > 1]
        members = [_read(folder / name) for name in names]
        rows.append(_summary(first, varied, members))
    return sorted(rows, key=lambda row: (row["backbone"] or "", row["method"]))


def _flat(recipe: Row) -> Row:
    """Fields and settings side by side, without those that do not tell recipes apart."""
    own = {key: value for key, value in recipe.items() if key not in ("settings", "seed", "out", "data_dir", "device")}
    return own | recipe["settings"]


def _read(run: Path) -> Row:
    if (run / FAILURE).exists():
        return {"failure": (run / FAILURE).read_text("utf-8")}
    if not (run / "recipe.json").exists():  # not begun
        return {}
    recipe, provenance = read_json(run / "recipe.json"), read_json(run / "provenance.json")
    if recipe is None or provenance is None:
        damaged = "recipe.json" if recipe is None else "provenance.json"
        return {"failure": f"{run / damaged} is missing or damaged: delete the folder, and begin the command again"}
    metrics = read_json_lines(run / "metrics.jsonl")
    row: Row = {"recipe": _flat(recipe), "scores": {r["evaluation"]: r["accuracy"] for r in _own_scores(run, recipe)}}
    row |= {"crops": provenance["crops"], "networks": provenance["networks"]}
    if metrics:
        row["minutes"] = sum(m["seconds"] for m in metrics) / 60
        row["images_per_second"] = statistics.median(m["images_per_second"] for m in metrics)
        memory = [m["peak_memory"] for m in metrics if m["peak_memory"]]
        row["memory_gb"] = max(memory) / 1e9 if memory else None
    return row


def _own_scores(run: Path, recipe: Row) -> list[Row]:
    return [r for r in read_json_lines(run / "results.jsonl") if r["of"] == "pretrained" and is_own_score(r, recipe)]


def is_own_score(result: Row, recipe: Row) -> bool:
    """A score of the finished run on its own data, all labels and its input size: no transfer, no probe on the way."""
    same_size = result.get("image_size") in (None, recipe["image_size"])
    return "step" not in result and "subset" not in result and result["data"] == recipe["data"] and same_size


def _summary(planned: Row, varied: list[str], members: list[Row]) -> Row:
    good = [m for m in members if m.get("scores")]
    recipe = good[0]["recipe"] if good else planned  # of a run: with the values that were chosen for it
    row: Row = {key: recipe[key] for key in ("method", "backbone")}
    row |= {key: recipe[key] for key in varied} | {"seeds": len(good)}
    failures = [m["failure"] for m in members if "failure" in m]
    if failures:
        row["failure"] = failures[0]
    if good:
        row |= {key: recipe[key] for key in ("data", "epochs", "batch_size", "optimizer")}
        row |= {key: good[0][key] for key in ("crops", "networks")}
        for key in ("minutes", "images_per_second", "memory_gb"):
            values = [m[key] for m in good if m.get(key) is not None]
            row[key] = statistics.mean(values) if values else None
        for name in good[0]["scores"]:
            values = [m["scores"][name] for m in good if name in m["scores"]]
            row[name] = (statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)
    return row


def columns(rows: list[Row]) -> list[str]:
    """In which order: what was run, what it scored, what it cost."""
    first = ["method", "backbone", "epochs", "seeds", "optimizer", "batch_size", "crops", "networks"]
    last = ["minutes", "images_per_second", "memory_gb", "failure"]
    names = dict.fromkeys(name for row in rows for name in row if name not in ("data", *first, *last))
    scores = [name for name in names if any(isinstance(row.get(name), tuple | list) for row in rows)]
    varied = [name for name in names if name not in scores]
    return [*first, *varied, *scores, *last]


def cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, tuple | list):
        mean, spread = value
        return f"{mean:.1f}" if spread is None else f"{mean:.1f} ± {spread:.1f}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
    return str(value)


def _used(rows: list[Row]) -> list[str]:
    return [name for name in columns(rows) if any(row.get(name) is not None for row in rows)]


def markdown(rows: list[Row]) -> str:
    names = _used(rows)
    head = [name.replace("_", " ") for name in names]
    return markdown_table(head, ([cell(row.get(name)) for name in names] for row in rows)) + "\n"


def as_csv(rows: list[Row]) -> str:
    """Numbers in full; a score has its mean and its standard deviation over the seeds."""
    flat = []
    for row in rows:
        plain = {k: v for k, v in row.items() if not isinstance(v, tuple)}
        for name, value in row.items():
            if isinstance(value, tuple):
                plain[name], plain[f"{name} std"] = value
        flat.append(plain)
    return csv_text(flat)


IN_LATEX = str.maketrans(
    {char: f"\\{char}" for char in "_%&#${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"$<$", ">": r"$>$"}
    | {"–": "--", "−": "$-$", "±": r"$\pm$", "×": r"$\times$", "≥": r"$\ge$", "≤": r"$\le$"}
)


def latex(rows: list[Row]) -> str:
    names = _used(rows)
    lines = [r"\begin{tabular}{" + "l" * len(names) + "}", r"\hline"]
    lines.append(" & ".join(name.replace("_", " ") for name in names) + r" \\ \hline")
    lines += [" & ".join(cell(row.get(name)).translate(IN_LATEX) for name in names) + r" \\" for row in rows]
    return "\n".join([*lines, r"\hline", r"\end{tabular}"]) + "\n"
