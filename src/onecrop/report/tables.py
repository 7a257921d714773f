"""Result rows as text."""

from collections.abc import Sequence
from typing import Any


def result_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a candidate, one column an evaluation, in the order they come; accuracies in percent."""
    names = list(dict.fromkeys(row["evaluation"] for row in rows))
    candidates = list(dict.fromkeys(row["of"] for row in rows))
    score = {(row["of"], row["evaluation"]): row["accuracy"] for row in rows}
    width = max(map(len, [*candidates, "features"]))
    lines = ["  ".join([f"{'features':<{width}}", *(f"{name:>12}" for name in names)])]
    for candidate in candidates:
        values = (score.get((candidate, name)) for name in names)
        cells = (f"{'–':>12}" if value is None else f"{value:>12.1f}" for value in values)
        lines.append("  ".join([f"{candidate:<{width}}", *cells]))
    return "\n".join(lines)
