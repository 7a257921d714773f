"""Whether the ranking of a table's rows depends on the probe."""

from collections.abc import Callable, Sequence
from typing import Any

from onecrop.report.tables import markdown_table

Row = tuple[str, ...]  # the head cells of a table's row
PROBES = ("linear", "linear-fast", "knn")


def compare_probes(letter: str, scored: Sequence[dict[str, Any]], name: Callable[[Row], str]) -> list[str]:
    """Whether a table's ranking depends on the probe; nothing for tables of fewer probes or of few rows."""
    scores: dict[str, dict[Row, float]] = {probe: {} for probe in PROBES}
    for cell in scored:
        if cell["column"] in scores:
            scores[cell["column"]][tuple(cell["row"])] = cell["ours"]
    rows = sorted(set.intersection(*map(set, scores.values())), key=lambda row: (-scores["linear"][row], row))
    if len(rows) < 3:
        return []
    cells = []
    for row in rows:
        ranks = {probe: 1 + sum(score[other] > score[row] for other in rows) for probe, score in scores.items()}
        cells.append([name(row), *(f"{scores[probe][row]:.1f} ({ranks[probe]}.)" for probe in PROBES)])
    lines = ["", f"## Do the probes rank alike? ({letter})", "", markdown_table(("row", *PROBES), cells)]
    pairs = [(a, b) for number, a in enumerate(rows) for b in rows[number + 1 :]]
    for probe in PROBES[1:]:
        turned = sum(scores[probe][a] < scores[probe][b] for a, b in pairs)
        lines += ["", f"{probe} turns {turned} of {len(pairs)} pairs of rows around, against linear."]
    return lines
