"""Result rows as text."""

import csv
import io
from collections.abc import Iterable, Sequence
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


def conditions(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each data set and input size: what the rows' figures hold for."""
    lines = dict.fromkeys(
        f"{row['pretraining']['data']} → {row['data']}: {row['image_size']} px ({row['resize']}); "
        f"{row['num_train']:,} train, {row['num_test']:,} test, {row['num_classes']} classes, {row['split']}"
        for row in rows
    )
    return "\n".join(lines)


def share_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: one line a share of the labels, one column a way to use them; accuracies in percent."""
    ways = list(dict.fromkeys(row["of"] for row in rows))
    shares = list(dict.fromkeys((row["share"], row["num_labels"]) for row in rows))
    value = {(row["of"], row["share"]): row["accuracy"] for row in rows}
    rows_of = ([f"{100 * s:g} % ({count:,})", *(f"{value[way, s]:.1f}" for way in ways)] for s, count in shares)
    return markdown_table(["labels", *ways], rows_of)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "/") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def csv_text(rows: Iterable[dict[str, Any]]) -> str:
    """A column for every key, in the order they come; numbers in full."""
    rows, text = list(rows), io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
