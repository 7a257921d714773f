"""The page of claims: what the paper says, and what the measured tables say to it.

A claim is a set of comparisons between cells of tables that `onecrop reproduce` has made. No verdict is written by
hand: each follows from the numbers, their spread over seeds and the size of the test set.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onecrop.errors import UserError
from onecrop.files import write_atomically

Row = tuple[str, ...]  # the head cells of a table's row
COST = ("hours", "memory, MB")  # less is better; two machines of a kind differ by some percent
COST_NOISE = 0.05
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


class Finding(NamedTuple):
    """One comparison in one column of one measured table."""

    comparison: Comparison
    column: str
    under: str  # recipe, epochs, images
    ahead: str
    behind: str
    difference: float  # how far ahead
    noise: float  # twice the standard error of that
    seeds: int

    @property
    def verdict(self) -> str:
        if self.difference > self.noise or (self.comparison.or_equal and self.difference >= -self.noise):
            return HOLDS
        return FAILS if self.difference < -self.noise or self.comparison.or_equal else EQUAL


def write_claims(folder: Path, claims: Sequence[Claim], out: Path) -> Path:
    """From the tables of `onecrop reproduce` (*.json) in `folder`."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name one with tables that onecrop reproduce has made")
    tables = [content for file in sorted(folder.glob("*.json")) if "table" in (content := _read(file))]
    lines = [HEAD.format(folder=folder), "| claim | stands in | verdict |", "| --- | --- | --- |"]
    found = [_findings(claim, tables) for claim in claims]
    for number, (claim, findings) in enumerate(zip(claims, found, strict=True), 1):
        lines.append(f"| {number}. {claim.says} | {claim.where} | {verdict(findings)} |")
    for number, (claim, findings) in enumerate(zip(claims, found, strict=True), 1):
        lines += ["", f"## {number}. {claim.says}", "", *_section(claim, findings)]
    for table in tables:
        lines += [*_probes(table)]
    lines += ["", "## The tables behind it", "", *_sources(claims, tables), ""]
    write_atomically(out, "\n".join(lines).encode())
    return out


HEAD = """# Which of the paper's claims hold

Made by `onecrop claims {folder}` from tables of `onecrop reproduce` in that folder; no verdict is written by hand.

A difference counts where it is over twice its standard error. The error of an accuracy is the spread over seeds, of all
rows of the table together, by the root of their number; where no row has two seeds it is √(p(1 − p)/n) for n test
pictures. Hours and memory have to differ by 5 %. A claim of several comparisons holds where all of them do; under which
recipe, for how many epochs and images, stands beside the verdict.
"""


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def _findings(claim: Claim, tables: Sequence[dict[str, Any]]) -> list[Finding]:
    every = ((comparison, table) for comparison in claim.comparisons for table in tables)
    return [
        finding
        for comparison, table in every
        if table["table"] == comparison.table
        for finding in compare_rows(comparison, table)
    ]


def compare_rows(comparison: Comparison, table: dict[str, Any]) -> Iterator[Finding]:
    cells = {(tuple(cell["row"]), cell["column"]): cell for cell in table["cells"] if cell["ours"] is not None}
    for column in comparison.columns:
        found = [cells.get((row, column)) for row in (comparison.ahead, comparison.behind, *comparison.over)]
        used = [cell for cell in found if cell is not None]
        if len(used) < len(found):
            continue  # not measured yet
        ahead, behind = used[0::2], used[1::2]  # each with the row it leads, where that is what counts
        difference = _lead(ahead) - _lead(behind)
        spread = _spread([cell for (_, other), cell in cells.items() if other == column])
        yield Finding(
            comparison,
            column,
            _under(table, used),
            " − ".join(map(_value, ahead)),
            " − ".join(map(_value, behind)),
            -difference if column in COST else difference,
            2 * math.hypot(*(standard_error(cell, spread) for cell in used)),
            min(cell["seeds"] for cell in used),
        )


def _lead(cells: Sequence[dict[str, Any]]) -> float:
    return float(cells[0]["ours"] - sum(cell["ours"] for cell in cells[1:]))


def _spread(cells: Sequence[dict[str, Any]]) -> float | None:
    """The standard deviation over seeds that the rows of a column have in common: one of two seeds says little."""
    variances = [cell["std"] ** 2 for cell in cells if cell["std"] is not None for _ in range(cell["seeds"] - 1)]
    return math.sqrt(sum(variances) / len(variances)) if variances else None


def standard_error(cell: dict[str, Any], spread: float | None) -> float:
    """Of a mean over seeds, in the cell's own unit."""
    if cell["column"] in COST:
        return COST_NOISE / 2 * float(cell["ours"]) / math.sqrt(2)  # two equal cells: 5 % in all
    if spread is not None:
        return spread / math.sqrt(cell["seeds"])
    share = cell["ours"] / 100
    return 100 * math.sqrt(max(0.0, share * (1 - share)) / cell["num_test"])


def _under(table: dict[str, Any], cells: Sequence[dict[str, Any]]) -> str:
    epochs = sorted({cell["epochs"] for cell in cells})
    images = sorted({cell["images"] for cell in cells})
    told = [f"recipe {table['recipe']}", f"{_range(epochs)} epochs", f"{_range(images)} images"]
    other = [text for text in table["differences"] if " stands for " in text or text.startswith("scored by ")]
    return ", ".join([*told, *other])


def _range(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def _value(cell: dict[str, Any]) -> str:
    if cell["column"] in COST:
        return f"{cell['ours']:.3g}"
    return f"{cell['ours']:.1f}" + (f" ± {cell['std']:.1f}" if cell["std"] is not None else "")


def verdict(findings: Sequence[Finding]) -> str:
    """Of a claim: one word where all its conditions agree, else which of them say what."""
    if not findings:
        return "not measured"
    conditions = dict[str, list[Finding]]()
    for finding in findings:
        conditions.setdefault(f"{finding.column}, {finding.under}", []).append(finding)
    words = {condition: _together(part) for condition, part in conditions.items()}
    if len(set(words.values())) == 1:
        return f"**{next(iter(words.values()))}** ({'; '.join(words)})"
    return "; ".join(f"**{word}** under {condition}" for condition, word in words.items())


def _together(findings: Sequence[Finding]) -> str:
    """Of several comparisons under one condition."""
    verdicts = [finding.verdict for finding in findings]
    seeds = min(finding.seeds for finding in findings)
    word = (
        verdicts[0] if len(set(verdicts)) == 1 else f"holds in {verdicts.count(HOLDS)} of {len(verdicts)} comparisons"
    )
    return word + (", one seed" if seeds == 1 else "")


def _section(claim: Claim, findings: Sequence[Finding]) -> list[str]:
    lines = [f"The paper: {claim.printed}", ""] if claim.printed else []
    if not findings:
        tables = dict.fromkeys(comparison.table for comparison in claim.comparisons)
        return [*lines, "Not measured: " + ", ".join(f"`onecrop reproduce {table}`" for table in tables) + "."]
    lines += ["| better | than | in | ours | against | ahead by | noise | seeds | |", "|" + " --- |" * 9]
    for finding in findings:
        rows = [
            ", ".join(row) for row in (finding.comparison.ahead, finding.comparison.behind, *finding.comparison.over)
        ]
        ahead, behind = " − ".join(rows[0::2]), " − ".join(rows[1::2])
        where = f"{finding.comparison.table}: {finding.column}; {finding.under}"
        gap = f"{finding.difference:+.3g}".replace("-", "−")
        numbers = f"{finding.ahead} | {finding.behind} | {gap} | {finding.noise:.2g} | {finding.seeds}"
        lines.append(f"| {ahead} | {behind} | {where} | {numbers} | {finding.verdict} |")
    return lines


PROBES = ("linear", "linear-fast", "knn")


def _probes(table: dict[str, Any]) -> list[str]:
    """Whether a table's ranking depends on the probe; nothing for tables of one probe or of few rows."""
    scores: dict[str, dict[Row, float]] = {probe: {} for probe in PROBES}
    for cell in table["cells"]:
        if cell["column"] in scores and cell["ours"] is not None:
            scores[cell["column"]][tuple(cell["row"])] = cell["ours"]
    rows = sorted(set.intersection(*(set(score) for score in scores.values())), key=lambda row: -scores["linear"][row])
    if len(rows) < 3:
        return []
    ranks = {probe: {row: 1 + sum(score[other] > score[row] for other in rows) for row in rows}
             for probe, score in scores.items()}  # fmt: skip
    lines = ["", f"## Do the probes rank alike? {table['title']}, recipe {table['recipe']}", ""]
    lines += [f"| row | {' | '.join(PROBES)} |", "|" + " --- |" * (1 + len(PROBES))]
    for row in rows:
        cells = " | ".join(f"{scores[probe][row]:.1f} ({ranks[probe][row]}.)" for probe in PROBES)
        lines.append(f"| {', '.join(row)} | {cells} |")
    pairs = [(a, b) for number, a in enumerate(rows) for b in rows[number + 1 :]]
    for probe in PROBES[1:]:
        turned = sum((scores["linear"][a] - scores["linear"][b]) * (scores[probe][a] - scores[probe][b]) < 0
                     for a, b in pairs)  # fmt: skip
        lines += ["", f"{probe} turns {turned} of {len(pairs)} pairs of rows around, against linear."]
    return lines


def _sources(claims: Sequence[Claim], tables: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for table in tables:
        lines.append(f"- {table['title']} ({table['date']}, {table['device']}, torch {table['torch']}):")
        lines.append(f"  `{table['command']}`")
    wanted = {comparison.table for claim in claims for comparison in claim.comparisons}
    missing = sorted(wanted - {table["table"] for table in tables})
    return lines + ([f"- not measured: {', '.join(missing)}"] if missing else [])
