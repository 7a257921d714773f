"""A picture and those nearest to it, on one sheet."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from onecrop.files import atomically
from onecrop.report.sheet import COLUMNS, LINE, TILE, fitted, write_line


def draw_neighbours(
    pictures: Sequence[NDArray[np.uint8]], aspects: Sequence[float], captions: Sequence[str], path: Path
) -> Path:
    """Squashed squares [R, R, 3] in their true proportions; the first one, the query, has a frame."""
    rows = -(-len(pictures) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * TILE, rows * (TILE + LINE)), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (pixels, aspect, caption) in enumerate(zip(pictures, aspects, captions, strict=True)):
        x, y = number % COLUMNS * TILE, number // COLUMNS * (TILE + LINE)
        sheet.paste(Image.fromarray(np.ascontiguousarray(pixels)).resize(fitted(aspect)), (x + 2, y + 2))
        if number == 0:
            pen.rectangle((x, y, x + TILE - 3, y + TILE - 3), outline="green", width=2)
        write_line(pen, x, y + TILE - 2, caption, 1)
    with atomically(path) as temporary:
        sheet.save(temporary, "PNG")
    return path
