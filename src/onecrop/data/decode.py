"""From the bytes of an image file to an upright square of eight-bit RGB. Whatever is wrong with a file is a reason."""

from collections.abc import Callable
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

Opener = Callable[[], BinaryIO]

ORIENTATION = 0x0112  # EXIF: which way up the camera was
# EXIF's eight values -> what makes the picture upright
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class Picture(NamedTuple):
    square: Image.Image  # RGB, size × size, upright
    width: int  # of the upright original
    height: int
    format: str
    mode: str  # Pillow's name for how the file stores colour


def decode(open_file: Opener, size: int) -> Picture | str:
    """-> the picture, or why it cannot be read. The whole file is decoded: one cut short is found out."""
    try:
        with open_file() as file:
            if not file.read(1):
                return "the file is empty"
            file.seek(0)
            return _decode(file, size)
    except UnidentifiedImageError:
        return "not an image, or damaged in its first bytes"
    except Exception as error:  # decoders fail in many ways, and none of them may end a night's work
        reason = getattr(error, "strerror", None) or str(error)  # the system's, without its number and the name
        return " ".join(reason.split()) or type(error).__name__


def _decode(file: BinaryIO, size: int) -> Picture:
    with Image.open(file) as image:  # refuses a decompression bomb by its declared size
        name, mode, (width, height) = image.format or "?", image.mode, image.size
        image.draft("RGB", (size, size))  # JPEG only: decode at the nearest larger eighth
        image.load()
        orientation = _orientation(image)
        if image.size != (width, height) and name == "TIFF":
            width, height = image.size  # Pillow turns TIFF itself
        # Antialiased: the filter's support grows with the reduction. Squashing to a square and turning by quarters
        # can change places, and turning the small picture is cheaper.
        square = _eight_bits(image).resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0)
    if orientation in UPRIGHT:
        square = square.transpose(UPRIGHT[orientation])
    if orientation in (5, 6, 7, 8):  # lies on its side
        width, height = height, width
    square = square if square.mode == "RGB" else square.convert("RGB")
    return Picture(square, width, height, name, mode)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged EXIF in a sound picture
        return 1


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey or RGB of eight bits; deeper pictures are scaled, transparent ones laid on white.

    White, because cut-outs, logos and drawings are made for a white page; what lies under full transparency is
    arbitrary, most often black.
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return Image.fromarray(_scaled(np.asarray(image)))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        overlay = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), overlay)
    if image.mode == "1":
        return image.convert("L")
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


def _scaled(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    """16 bits by the depth the sensor had: 8, 10, 12, 14 or 16 bits, whichever holds the brightest pixel.

    Floats and wider integers have no such depth: their own range becomes black to white.
    """
    deep = values.astype(np.float32)
    finite = np.isfinite(deep)
    low, high = (float(deep[finite].min()), float(deep[finite].max())) if finite.any() else (0.0, 0.0)
    if values.dtype.kind in "iu" and low >= 0 and high <= 65535:
        low, high = 0.0, float(next(2**bits - 1 for bits in (8, 10, 12, 14, 16) if high < 2**bits))
    deep[~finite] = low
    return ((deep - low) * (255 / ((high - low) or 1)) + 0.5).astype(np.uint8)
