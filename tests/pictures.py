"""Pictures for tests: drawn ones that differ from each other, and photographs where a copy lies beside the checkout."""

import io
import subprocess
import sys

import numpy as np
from PIL import Image

from tests.conftest import DATA

FORMATS = ("jpg", "png", "webp", "tiff", "gif")


def picture(number, size=(48, 36)):
    """Smooth colours and an edge or two, a function of its number; unlike any other number's."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 255, (6, 8, 3), np.uint8))
    return coarse.resize(size, Image.Resampling.BICUBIC)


def encoded(number, kind, size=(48, 36)):
    content = io.BytesIO()
    picture(number, size).save(content, {"jpg": "JPEG", "tiff": "TIFF"}.get(kind, kind.upper()))
    return content.getvalue()


def write_pictures(folder, count, first=0, kind="jpg", size=(48, 36)):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        (folder / f"{number:05d}.{kind}").write_bytes(encoded(number, kind, size))
    return folder


def photographs(folder):
    """480 photographs of many sizes; DATA says where they come from."""
    command = [sys.executable, DATA / "unpack.py", "voc-mini", "--out", folder]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return sorted((folder / "VOCdevkit").rglob("*.jpg"))
