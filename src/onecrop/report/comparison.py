"""One table of a comparison, from its run folders: Markdown, CSV, LaTeX and a picture of accuracy against cost."""

import csv
import io
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from onecrop.errors import UserError
from onecrop.files import read_json_lines, write_atomically
from onecrop.report.plots import plot_cost

FAILURE = "failure.txt"  # in a member's folder: why it has no result

Row = dict[str, Any]


def write_comparison(folder: Path) -> Path:
    """Read every run below `folder` and write comparison.{md,csv,tex,png} there -> the Markdown file."""
    rows = collect(folder)
    write_atomically(folder / "comparison.md", markdown(rows).encode())
    write_atomically(folder / "comparison.csv", as_csv(rows).encode())
    write_atomically(folder / "comparison.tex", latex(rows).encode())
    scored = [row for row in rows if row.get("minutes")]
    if scored:
        try:
            plot_cost(scored, folder / "comparison.png")
        except UserError as error:  # without matplotlib the tables are still worth having
            print(f"no picture: {error}")
    return folder / "comparison.md"


def collect(folder: Path) -> list[Row]:
    """One row a method and backbone, over its seeds."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for recipe_file in sorted(folder.glob("*/recipe.json")):
        member = _read(recipe_file.parent)
        groups[member["backbone"], member["method"]].append(member)
    for failure in sorted(folder.glob(f"*/{FAILURE}")):
        if not (failure.parent / "recipe.json").exists():  # failed before it began
            method, _, rest = failure.parent.name.partition("-")
            backbone = rest.rpartition("-")[0].replace("timm-", "timm/", 1)
            groups[backbone, method].append({"failure": failure.read_text()})
    return [_summary(method, backbone, members) for (backbone, method), members in sorted(groups.items())]


def _read(run: Path) -> Row:
    recipe = json.loads((run / "recipe.json").read_text())
    provenance = json.loads((run / "provenance.json").read_text())
    metrics = read_json_lines(run / "metrics.jsonl")
    results = [
        r
        for r in read_json_lines(run / "results.jsonl")
        if r["of"] == "pretrained"
        and "step" not in r
        and r["data"] == recipe["data"]  # not transfers, nor probes on the way
    ]
    row: Row = {key: recipe[key] for key in ("method", "backbone", "epochs", "seed", "batch_size", "optimizer", "data")}
    row |= {"crops": provenance["crops"], "networks": provenance["networks"], "device": provenance["device"]}
    if (run / FAILURE).exists():
        row["failure"] = (run / FAILURE).read_text()
    elif metrics:
        row["minutes"] = sum(m["seconds"] for m in metrics) / 60
        row["images_per_second"] = statistics.median(m["images_per_second"] for m in metrics)
        memory = [m["peak_memory"] for m in metrics if m["peak_memory"]]
        row["memory_gb"] = max(memory) / 1e9 if memory else None
        row["scores"] = {r["evaluation"]: r["accuracy"] for r in results}
    return row


def _summary(method: str, backbone: str, members: list[Row]) -> Row:
    good = [m for m in members if m.get("scores")]
    row: Row = {"method": method, "backbone": backbone, "seeds": len(good)}
    failures = [m["failure"] for m in members if "failure" in m]
    if failures:
        row["failure"] = failures[0]
    if good:
        row |= {
            key: good[0][key] for key in ("crops", "networks", "epochs", "batch_size", "optimizer", "data", "device")
        }
        for key in ("minutes", "images_per_second", "memory_gb"):
            values = [m[key] for m in good if m[key] is not None]
            row[key] = statistics.mean(values) if values else None
        for name in good[0]["scores"]:
            values = [m["scores"][name] for m in good if name in m["scores"]]
            row[name] = (statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)
    return row


def columns(rows: list[Row]) -> list[str]:
    scores = list(dict.fromkeys(k for row in rows for k, v in row.items() if isinstance(v, tuple)))
    fixed = ["method", "backbone", "epochs", "seeds", "batch_size", "optimizer", "crops", "networks"]
    return [*fixed, *scores, "minutes", "images_per_second", "memory_gb", "failure"]


def cell(value: Any, plus_minus: str = "±") -> str:
    if value is None:
        return "–"
    if isinstance(value, tuple):
        mean, spread = value
        return f"{mean:.1f}" if spread is None else f"{mean:.1f} {plus_minus} {spread:.1f}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
    return str(value)


def _used(rows: list[Row]) -> list[str]:
    return [name for name in columns(rows) if any(row.get(name) is not None for row in rows)]


def markdown(rows: list[Row]) -> str:
    names = _used(rows)
    lines = [" | ".join(["", *(name.replace("_", " ") for name in names), ""]).strip(), "|" + " --- |" * len(names)]
    lines += [" | ".join(["", *(cell(row.get(name)).replace("|", "/") for name in names), ""]).strip() for row in rows]
    return "\n".join(lines) + "\n"


def as_csv(rows: list[Row]) -> str:
    """Numbers in full; a score has its mean and its standard deviation over the seeds."""
    text = io.StringIO()
    flat = []
    for row in rows:
        plain = {k: v for k, v in row.items() if not isinstance(v, tuple)}
        for name, value in row.items():
            if isinstance(value, tuple):
                plain[name], plain[f"{name} std"] = value
        flat.append(plain)
    names = list(dict.fromkeys(name for row in flat for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def latex(rows: list[Row]) -> str:
    names = _used(rows)
    clean = str.maketrans({"_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "–": "--"})
    lines = [r"\begin{tabular}{" + "l" * len(names) + "}", r"\hline"]
    lines.append(" & ".join(name.replace("_", " ") for name in names) + r" \\ \hline")
    lines += [" & ".join(cell(row.get(name), r"PM").translate(clean) for name in names) + r" \\" for row in rows]
    return "\n".join([*lines, r"\hline", r"\end{tabular}"]).replace("PM", r"$\pm$") + "\n"
