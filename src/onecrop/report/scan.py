"""What a scan found, as text, as a list of files and as a contact sheet. Everything comes from its JSON facts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from onecrop.files import atomically, printable, write_atomically
from onecrop.progress import duration, readable
from onecrop.report.sheet import COLUMNS, LINE, TILE, write_line

SHOWN = 40  # groups, and broken files, on the sheet
MODES = {
    "RGB": "colour",
    "L": "grey",
    "P": "palette",
    "RGBA": "colour with transparency",
    "LA": "grey with transparency",
    "1": "black and white",
    "I;16": "grey of 16 bits",
    "F": "floats",
}


def scan_text(facts: Mapping[str, Any]) -> str:
    """The summary for a terminal."""
    others = sum(facts["not_images"].values())
    lines = [
        ("images", f"{facts['images']:,} ({readable(facts['bytes'])}), read in {duration(facts['seconds'])}"),
        ("formats", _counts(facts["formats"])),
        ("colour", _counts({MODES.get(mode, mode): count for mode, count in facts["modes"].items()})),
        ("sizes", f"width {_range(facts['width'])}, height {_range(facts['height'])} px" if facts["images"] else "–"),
        ("broken", f"{len(facts['broken']):,}{_first(facts['broken'])}"),
        ("no images", f"{others:,}" + (f": {_counts(facts['not_images'])}" if others else "")),
        ("passed over", f"{len(facts['passed_over']):,}{_first(facts['passed_over'])}"),
        ("duplicates", _duplicates(facts)),
    ]
    forecast = [("forecast", "none: training needs two images or more")]
    lines += [("", ""), *(_forecast(facts["forecast"]) if facts["forecast"] else forecast)]
    return "\n".join(f"{name:<12} {text}".rstrip() for name, text in lines)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{printable(name)} {count:,}" for name, count in counts.items()) or "–"


def _range(spread: Mapping[str, float]) -> str:
    return f"{spread['least']:,.0f} to {spread['most']:,.0f} (median {spread['median']:,.0f})"


def _first(skipped: Sequence[Mapping[str, str]]) -> str:
    return f": {printable(skipped[0]['name'])} ({skipped[0]['reason']})" + ", …" * (len(skipped) > 1) if skipped else ""


def _some(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _duplicates(facts: Mapping[str, Any]) -> str:
    repeats = facts["exact_duplicates"] + facts["near_duplicates"]
    if not repeats:
        return "0"
    return f"\n{'':<12} ".join(
        (
            f"{repeats:,} in {_some(len(facts['groups']), 'group')}: {facts['exact_duplicates']:,} byte for byte, "
            f"{facts['near_duplicates']:,} nearly",
            f"Every image is a class of its own: {_some(facts['pairs_pushed_apart'], 'pair')} of one and the same "
            "picture would be pushed apart,",
            f"and {repeats / facts['images']:.1%} of every epoch spent on repeats: "
            "`onecrop pretrain --drop-duplicates true` leaves them out",
        )
    )


def _forecast(forecast: Mapping[str, Any]) -> list[tuple[str, str]]:
    memory = ", ".join(f"{name} {readable(size)}" for name, size in forecast["memory"].items() if size)
    if forecast["seconds"] is None:
        expected = "not measured: its tables are too large to make for a trial"
    else:
        expected = f"about {duration(forecast['seconds'])} for {forecast['epochs']} epochs ({forecast['timed']})"
    return [
        ("forecast", f"{forecast['run']} on {forecast['device']}"),
        ("  pack", f"{readable(forecast['pack'])} on the disk, {forecast['stored_size']} px an image"),
        ("  bank", readable(forecast["memory"]["bank"])),
        ("  memory", f"{readable(sum(forecast['memory'].values()))} ({memory})"),
        ("  time", expected),
    ]


def write_findings(facts: Mapping[str, Any], path: Path) -> Path:
    """Tab-separated: kind, group, name, remark. One line a file that is broken, passed over or double."""
    rows = [("kind", "group", "file", "remark")]
    rows += [("broken", "", one["name"], one["reason"]) for one in facts["broken"]]
    rows += [("passed over", "", one["name"], one["reason"]) for one in facts["passed_over"]]
    for number, group in enumerate(facts["groups"], 1):
        rows.append(("original", str(number), group["kept"], ""))
        for kind in ("exact", "near"):
            rows += [(kind, str(number), name, f"repeats {printable(group['kept'])}") for name in group[kind]]
    lines = ("\t".join((kind, group, printable(name), remark)) for kind, group, name, remark in rows)
    write_atomically(path, ("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))
    return path


def sheet_names(facts: Mapping[str, Any]) -> set[str]:
    """The pictures that the contact sheet wants to show."""
    return {name for group in facts["groups"][:SHOWN] for name in _members(group)[:COLUMNS]}


def _members(group: Mapping[str, Any]) -> list[str]:
    return [group["kept"], *group["exact"], *group["near"]]


def draw_contact_sheet(facts: Mapping[str, Any], thumbnails: Mapping[str, NDArray[np.uint8]], path: Path) -> Path:
    """Groups of duplicates, the original first, numbered as in the list; then broken files and their reasons."""
    groups, broken = facts["groups"][:SHOWN], facts["broken"][:SHOWN]
    places = _places([len(_members(group)[:COLUMNS]) for group in groups])
    rows = places[-1][1] + 1 if places else 0
    row_height, top = TILE + 2 * LINE, 2 * LINE + rows * (TILE + 2 * LINE)
    sheet = Image.new("RGB", (COLUMNS * TILE, top + -(-len(broken) // COLUMNS) * TILE), "white")
    pen = ImageDraw.Draw(sheet)
    shown = f"{len(groups)} shown: green the original, red what repeats it nearly, brown byte for byte"
    write_line(pen, 0, 0, f"{_some(len(facts['groups']), 'group')} of duplicates, {shown}", COLUMNS)
    for number, (group, (column, row)) in enumerate(zip(groups, places, strict=True), 1):
        left, y, names = column * TILE, LINE + row * row_height, _members(group)
        write_line(pen, left, y, f"{number}: {_some(len(names), 'picture')}", 2, "grey")
        for x, name in zip(range(left, sheet.width, TILE), names, strict=False):
            if name in thumbnails:
                sheet.paste(Image.fromarray(thumbnails[name]), (x + 2, y + LINE))
            frame = "green" if name == group["kept"] else "red" if name in group["near"] else "brown"
            pen.rectangle((x, y + LINE - 2, x + TILE - 3, y + LINE + TILE - 5), outline=frame)
            write_line(pen, x, y + LINE + TILE - 4, Path(name).name, 1)
    write_line(pen, 0, top - LINE, f"{_some(len(facts['broken']), 'broken file')}, {len(broken)} shown", COLUMNS)
    for number, one in enumerate(broken):
        x, y = number % COLUMNS * TILE, top + number // COLUMNS * TILE
        pen.rectangle((x, y, x + TILE - 3, y + TILE - 3), fill="#eeeeee", outline="red")
        for line, text in enumerate([Path(one["name"]).name, *_wrapped(one["reason"])]):
            write_line(pen, x + 2, y + 2 + line * LINE, text, 1, "red" if line else "black")
    with atomically(path) as temporary:
        sheet.save(temporary, "PNG")
    return path


def _places(widths: Sequence[int]) -> list[tuple[int, int]]:
    """(column, row) of each group, one after the other like words on a line."""
    places, column, row = [], 0, 0
    for width in widths:
        if column + width > COLUMNS:
            column, row = 0, row + 1
        places.append((column, row))
        column += width
    return places


def _wrapped(text: str, width: int = TILE // 6) -> list[str]:
    words, lines = text.split(), [""]
    for word in words:
        lines = [*lines[:-1], f"{lines[-1]} {word}".strip()] if len(lines[-1]) + len(word) < width else [*lines, word]
    return lines[:6]
