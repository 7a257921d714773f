"""The page of results, made from result files: each file one section, with all that is needed to get it again.

A result file is JSON: title, command, date, device, torch, optional notes, and rows. `onecrop compare`, `onecrop sweep`
(comparison.json) and the benchmarks write such files.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onecrop.errors import UserError
from onecrop.files import write_atomically
from onecrop.report.comparison import PLAN, markdown

HEAD = """# Results

Made by `onecrop results {folder}` from the files of that folder; not written by hand. How experiments went, the failed
ones too: [log.md](log.md).
"""


def write_results(folder: Path, out: Path) -> Path:
    """Every result file of `folder`, in the order of their names -> one Markdown page."""
    sections = [section(result) for result in read_results(folder)]
    write_atomically(out, "\n".join([HEAD.format(folder=folder), *sections]).encode())
    return out


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Every *.json of a folder; a comparison's plan is no result."""
    files = sorted(file for file in folder.glob("*.json") if file.name != PLAN)
    if not files:
        raise UserError(f"no result files (*.json) in {folder}: run onecrop compare, reproduce or a benchmark first")
    return [_read(file) for file in files]


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    missing = [key for key in ("title", "command", "date", "device", "torch", "rows") if key not in content]
    if missing:
        raise UserError(f"{file} is not a result file: it has no {missing[0]}")
    if not isinstance(content["rows"], list) or not all(isinstance(row, dict) for row in content["rows"]):
        raise UserError(f"{file} is not a result file: its rows are no list of objects")
    return dict(content)


def section(result: dict[str, Any]) -> str:
    notes: Sequence[str] = result.get("notes", ())
    lines = [f"## {result['title']}", "", f"{result['date']}, {result['device']}, torch {result['torch']}.", *notes]
    if result.get("differences"):  # a table of `onecrop reproduce`
        lines.append(f"In brackets the paper's numbers. Not as in the paper: {'; '.join(result['differences'])}.")
    lines += ["", f"    {result['command']}", "", markdown(result["rows"])]
    return "\n".join(lines)
