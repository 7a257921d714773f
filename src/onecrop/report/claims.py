"""The page of claims: what the paper says, and what the measured tables say to it.

A claim is a set of comparisons between rows of tables that `onecrop reproduce` has made. No verdict is written by
hand: each follows from the numbers, their spread over seeds and the size of the test set.
"""

import math
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onecrop.files import write_atomically
from onecrop.report.ranks import Row, compare_probes
from onecrop.report.results import read_results
from onecrop.report.tables import markdown_table

Cell = dict[str, Any]
RUN_COST, EPOCH_COST = ("hours", "memory, MB"), ("epoch seconds", "memory gb")  # columns in which less is better
COST = (*RUN_COST, *EPOCH_COST)
# Two machines of a kind differ by some percent; the same runs on one kind, a day apart, took -7 to +12 % more.
COST_NOISE = {**dict.fromkeys(COST, 0.05), "hours": 0.2}
# Student's t for 1, 2, … repeats beyond the first of each row: what chance exceeds in one case of twenty
# fmt: off
STUDENT = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09,
)
# fmt: on
HOLDS, FAILS, EQUAL = "holds", "does not hold", "no difference beyond noise"


class Comparison(NamedTuple):
    """One row of a table is better than another."""

    table: str
    ahead: Row
    behind: Row
    columns: tuple[str, ...]
    or_equal: bool = False  # it is enough not to be worse
    over: tuple[Row, ...] = ()  # two rows: it is the lead of `ahead` over the first that exceeds that of `behind`


class Claim(NamedTuple):
    says: str
    where: str  # of the paper; "ours" where it goes beyond it
    comparisons: tuple[Comparison, ...]
    printed: str = ""  # what the paper prints for it


class Measured(NamedTuple):
    """A table that `onecrop reproduce` made, and the letter under which the page names it."""

    letter: str
    table: dict[str, Any]

    @property
    def scored(self) -> list[Cell]:
        return [cell for cell in self.table["cells"] if cell["ours"] is not None]

    def column(self, name: str) -> str:
        """`--with linear-fast` has that probe stand for the paper's own."""
        names = {cell["column"] for cell in self.scored}
        return "linear-fast" if name == "linear" and "linear" not in names and "linear-fast" in names else name

    def row(self, row: Row) -> str:
        """A number, a yes or a no says nothing without its head, nor does "its own" without the thing."""
        return ", ".join(self._said(head, value, row) for head, value in zip(self.table["heads"], row, strict=True))

    def _said(self, head: str, value: str, row: Row) -> str:
        if value == "its own":
            known = {cell[head] for cell in self.scored if tuple(cell["row"]) == row and head in cell}
            return " ".join([value, head, *sorted(known)])
        return value if value[0].isalpha() and value not in ("yes", "no") else f"{head} {value}"


class Finding(NamedTuple):
    """One comparison in one column of one measured table."""

    measured: Measured
    comparison: Comparison
    column: str
    ahead: tuple[Cell, ...]  # the row's cell and, where leads are compared, that of the row it leads
    behind: tuple[Cell, ...]
    noise: float  # what the difference has to exceed

    @property
    def difference(self) -> float:
        """How far ahead."""
        leads = [cells[0]["ours"] - sum(cell["ours"] for cell in cells[1:]) for cells in (self.ahead, self.behind)]
        return float(leads[1] - leads[0] if self.column in COST else leads[0] - leads[1])

    @property
    def condition(self) -> str:
        return f"{self.column} {self.measured.letter}"

    @property
    def seeds(self) -> int:
        return min(cell["seeds"] for cell in (*self.ahead, *self.behind))

    @property
    def verdict(self) -> str:
        if self.difference > self.noise or (self.comparison.or_equal and self.difference >= -self.noise):
            return HOLDS
        return FAILS if self.difference < -self.noise else EQUAL


def write_claims(folder: Path, claims: Sequence[Claim], out: Path) -> Path:
    """From the tables of `onecrop reproduce` and of benchmarks/cost.py (*.json) in `folder`."""
    tables = [table for result in read_results(folder) if (table := _as_table(result))]
    measured = [Measured(string.ascii_uppercase[n] if n < 26 else str(n), table) for n, table in enumerate(tables)]
    found = [_findings(claim, measured) for claim in claims]
    numbered = [
        (f"{number}. {claim.says}", claim, part)
        for number, (claim, part) in enumerate(zip(claims, found, strict=True), 1)
    ]
    verdicts = (
        (says, claim.where, verdict(findings, _missing(claim, measured, findings)))
        for says, claim, findings in numbered
    )
    lines = [HEAD.format(folder=folder), markdown_table(("claim", "stands in", "verdict"), verdicts)]
    lines += ["", "## Measured", "", *_sources(claims, measured)]
    for says, claim, findings in numbered:
        lines += ["", f"## {says}", "", *_section(claim, findings)]
    for one in measured:
        lines += compare_probes(one.letter, one.scored, one.row)
    write_atomically(out, "\n".join([*lines, ""]).encode())
    return out


HEAD = """# Which of the paper's claims hold

Made by `onecrop claims {folder}` from the tables of `onecrop reproduce` and of `benchmarks/cost.py` in that folder; no
verdict is written by hand.

A difference counts where chance alone would exceed it in one case of twenty. The error of an accuracy is the spread
over seeds, of all rows of the table together, by the root of their number, times Student's t for so many repeats: it
speaks of other seeds on these test pictures. Where no row has two seeds it is twice √(p(1 − p)/n) for n test pictures.
Hours of whole runs have to differ by a fifth, an epoch's seconds and memory by 5 %; cost is compared on one kind of
device alone. A claim of several comparisons holds where all of them are measured and do. Letters name the tables
listed below: recipe, length and data of the runs.
"""


def _as_table(content: dict[str, Any]) -> dict[str, Any] | None:
    """A table of `onecrop reproduce` is one; the cost of an epoch becomes one; other results are none."""
    if content.keys() >= {"table", "recipe", "heads", "cells", "differences"}:
        return content
    costs = [row for row in content["rows"] if row.get("epoch_seconds") is not None]
    if not costs:
        return None
    cells = [
        {
            "row": (row["backbone"], row["method"], f"{row['images']:,}"),
            "column": name.replace("_", " "),
            "ours": row[name],
            "std": None,
            "seeds": 1,
        }
        for row in costs
        for name in ("epoch_seconds", "memory_gb")  # EPOCH_COST
    ]
    facts = {"table": "cost", "recipe": None, "heads": ("backbone", "method", "images"), "differences": ()}
    return {**content, **facts, "cells": cells}


def _findings(claim: Claim, measured: Sequence[Measured]) -> list[Finding]:
    return [finding for comparison, one in _about(claim, measured) for finding in compare_rows(comparison, one)]


def _about(claim: Claim, measured: Sequence[Measured]) -> Iterator[tuple[Comparison, Measured]]:
    every = ((comparison, one) for comparison in claim.comparisons for one in measured)
    return ((comparison, one) for comparison, one in every if one.table["table"] == comparison.table)


def _missing(claim: Claim, measured: Sequence[Measured], findings: Sequence[Finding]) -> Counter[str]:
    """How many comparisons of each condition have no finding; a table of costs has whatever rows somebody wanted."""
    wanted = Counter(
        f"{one.column(column)} {one.letter}"
        for comparison, one in _about(claim, measured)
        for column in comparison.columns
        if comparison.table != "cost"
    )
    return wanted - Counter(finding.condition for finding in findings)


def compare_rows(comparison: Comparison, measured: Measured) -> Iterator[Finding]:
    """A finding for each column in which all of the rows are measured."""
    cells = {(tuple(cell["row"]), cell["column"]): cell for cell in measured.scored}
    for column in map(measured.column, comparison.columns):
        found = [cells.get((row, column)) for row in (comparison.ahead, comparison.behind, *comparison.over)]
        used = tuple(cell for cell in found if cell is not None)
        if len(used) < len(found) or (column in COST and len({cell.get("device") for cell in used}) > 1):
            continue
        spread = _spread([cell for (_, other), cell in cells.items() if other == column])
        noise = math.hypot(*(_noise(cell, spread) for cell in used))
        yield Finding(measured, comparison, column, used[0::2], used[1::2], noise)


def _spread(cells: Sequence[Cell]) -> float | None:
    """Student's t times the standard deviation over seeds that the rows of a column have in common."""
    variances = [cell["std"] ** 2 for cell in cells if cell["std"] is not None for _ in range(cell["seeds"] - 1)]
    if not variances:
        return None
    times = STUDENT[min(len(variances), len(STUDENT)) - 1]
    return times * math.sqrt(sum(variances) / len(variances))


def _noise(cell: Cell, spread: float | None) -> float:
    """Of a mean over seeds, in the cell's own unit; that of a difference is the root of the sum of their squares."""
    if cell["column"] in COST:
        return COST_NOISE[cell["column"]] * float(cell["ours"]) / math.sqrt(2)  # two equal cells: the share in all
    if spread:  # where no seed changed anything it says nothing
        return spread / math.sqrt(cell["seeds"])
    share = cell["ours"] / 100
    return 200 * math.sqrt(max(0.0, share * (1 - share)) / cell["num_test"])


def verdict(findings: Sequence[Finding], missing: Mapping[str, int]) -> str:
    """Of a claim: one word where all its conditions agree, else which of them say what."""
    if not findings:
        return "not measured"
    conditions = dict[str, list[Finding]]()
    for finding in findings:
        conditions.setdefault(finding.condition, []).append(finding)
    words = dict[str, list[str]]()
    for condition in dict.fromkeys((*conditions, *missing)):
        word = _together(conditions.get(condition, []), missing.get(condition, 0))
        words.setdefault(word, []).append(condition)
    return "; ".join(f"**{word}** ({', '.join(part)})" for word, part in words.items())


def _together(findings: Sequence[Finding], missing: int) -> str:
    """Of several comparisons under one condition, so many of which are not measured."""
    if not findings:
        return "not measured"
    verdicts = [finding.verdict for finding in findings]
    word = f"{verdicts.count(HOLDS)} of {len(verdicts)} comparisons hold"
    if missing:
        word += f", {missing} not measured"
    elif len(set(verdicts)) == 1:
        word = verdicts[0]
    alone = min(finding.seeds for finding in findings) == 1 and findings[0].column not in COST
    return word + (", one seed" if alone else "")


def _section(claim: Claim, findings: Sequence[Finding]) -> list[str]:
    lines = [f"The paper: {claim.printed}", ""] if claim.printed else []
    if not findings:
        tables = dict.fromkeys(comparison.table for comparison in claim.comparisons)
        orders = ("python benchmarks/cost.py" if table == "cost" else f"onecrop reproduce {table}" for table in tables)
        return [*lines, "Not measured: " + ", ".join(f"`{order}`" for order in orders) + "."]
    rows = []
    for finding in findings:
        compared = (finding.comparison.ahead, finding.comparison.behind, *finding.comparison.over)
        names = [finding.measured.row(row) for row in compared]
        cells = [
            " − ".join(names[0::2]),
            " − ".join(names[1::2]),
            f"{finding.column} {finding.measured.letter}",
            " − ".join(map(_value, finding.ahead)),
            " − ".join(map(_value, finding.behind)),
            f"{finding.difference:+.2g}".replace("-", "−"),
            f"{finding.noise:.2g}",
            str(finding.seeds),
            finding.verdict,
        ]
        rows.append(cells)
    head = ("better", "than", "in", "ours", "against", "ahead by", "noise", "seeds", "")
    return [*lines, markdown_table(head, rows)]


def _value(cell: Cell) -> str:
    if cell["column"] in COST:
        return f"{cell['ours']:.3g}"
    return f"{cell['ours']:.1f}" + (f" ± {cell['std']:.1f}" if cell["std"] is not None else "")


def _sources(claims: Sequence[Claim], measured: Sequence[Measured]) -> list[str]:
    """The tables by their letters, each with what it takes to get it again; and those that are missing."""
    lines = []
    for one in measured:
        letter, table = one
        values = {name: {cell[name] for cell in one.scored if name in cell} for name in ("epochs", "images")}
        told = [f"{_range(found)} {name}" for name, found in values.items() if found]  # untrained: no epochs
        told += [table["date"], table["device"], f"torch {table['torch']}", *table["differences"]]
        told += [note.rstrip(".") for note in table.get("notes", ())]
        recipe = f", recipe {table['recipe']}" if table["recipe"] else ""
        lines.append(f"- **{letter}** {table['title']}{recipe}: {'; '.join(told)}.")
        lines.append(f"  `{table['command']}`")
    wanted = {comparison.table for claim in claims for comparison in claim.comparisons}
    missing = sorted(wanted - {one.table["table"] for one in measured})
    return lines + ([f"- not measured: {', '.join(missing)}"] if missing else [])


def _range(values: set[int]) -> str:
    return f"{min(values):,}" if len(values) == 1 else f"{min(values):,} to {max(values):,}"
