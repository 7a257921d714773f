"""What sheets of small pictures share: tiles, and lines of text that fit them."""

from PIL import ImageDraw, ImageFont

from onecrop.files import printable

TILE, COLUMNS, LINE = 112, 8, 16  # px, tiles, px of a line of text
PICTURE = TILE - 6  # px of the longer side of a picture on its tile


def fitted(aspect: float) -> tuple[int, int]:
    """(width, height) of a picture of this width / height on a tile."""
    return max(1, round(PICTURE * min(1.0, aspect))), max(1, round(PICTURE / max(1.0, aspect)))


def write_line(pen: ImageDraw.ImageDraw, x: int, y: int, text: str, tiles: int, colour: str = "black") -> None:
    """One line, cut to the width of so many tiles; from its end, where file names differ."""
    font, text = ImageFont.load_default(11), printable(text)
    while len(text) > 4 and pen.textlength(text, font=font) > tiles * TILE - 6:
        text = "…" + text[2:]
    pen.text((x + 2, y), text, fill=colour, font=font)
