"""Every kind of picture in, an upright eight-bit square out; every kind of rubbish in, a reason out."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, features

from onecrop.data.decode import ORIENTATION, Picture, decode
from tests.pictures import FORMATS, encoded, picture

pytestmark = pytest.mark.filterwarnings("ignore")  # as where it is used: decoders warn of metadata


def decoded(content, size=32):
    return decode(lambda: io.BytesIO(content), size)


def saved(image, kind, **options):
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def pixels(content, size=32):
    found = decoded(content, size)
    assert isinstance(found, Picture), found
    return np.asarray(found.square).astype(int)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_the_picture_upright(kind, orientation):
    """A picture that was turned away and says so comes back as if it had not been."""
    upright = picture(3, (64, 32))
    away = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    stored = upright if away is None else upright.transpose(away)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    found = decoded(saved(stored, kind, exif=exif, **({"quality": 95} if kind != "TIFF" else {})))
    assert (found.width, found.height) == (64, 32)
    expected = np.asarray(upright.resize((32, 32), Image.Resampling.BILINEAR)).astype(int)
    assert abs(np.asarray(found.square) - expected).mean() < 4


def test_damaged_exif_does_not_cost_the_picture():
    content = saved(picture(1), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f" + bytes(range(200)))
    assert isinstance(decoded(content), Picture)


def deep_png(values):
    """A 16-bit grey PNG, as a camera writes it."""
    return saved(Image.fromarray(values.astype(np.uint16)), "PNG")


def test_sixteen_bits_are_scaled_and_not_clipped():
    ramp = np.linspace(0, 65535, 32 * 32).reshape(32, 32)
    for content in (deep_png(ramp), saved(Image.fromarray(ramp.astype(np.uint16)), "TIFF")):
        assert abs(pixels(content)[..., 0] - ramp / 257).max() <= 1


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
def test_a_sensor_of_fewer_bits_in_a_sixteen_bit_file(bits):
    ramp = np.linspace(0, 2**bits - 1, 32 * 32).reshape(32, 32).round()
    assert abs(pixels(deep_png(ramp))[..., 0] - ramp * 255 / (2**bits - 1)).max() <= 1


def test_sixteen_bit_colour():
    """PNG of 16 bits a channel, written by hand: Pillow itself cannot save one."""
    ramp = np.linspace(0, 65535, 32 * 32).reshape(32, 32)
    colours = np.stack([ramp, ramp[::-1], ramp.T], 2).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in colours)

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", 32, 32, 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    assert abs(pixels(b"\x89PNG\r\n\x1a\n" + parts) - colours.astype(int) / 257).max() <= 1


def test_floats_are_stretched_and_holes_in_them_are_dark():
    values = np.linspace(-3, 5, 32 * 32, dtype=np.float32).reshape(32, 32)
    grey = pixels(saved(Image.fromarray(values), "TIFF"))[..., 0]
    assert abs(grey - (values + 3) / 8 * 255).max() <= 1
    values[0, 0] = np.nan
    values[0, 1] = np.inf
    assert pixels(saved(Image.fromarray(values), "TIFF"))[0, 0, 0] == 0
    assert pixels(saved(Image.fromarray(np.full((8, 8), 7, np.float32)), "TIFF")).max() == 0


def test_transparent_pictures_lie_on_white():
    half = Image.new("RGBA", (32, 32), (255, 0, 0, 128))
    assert abs(pixels(saved(half, "PNG"))[0, 0] - [255, 127, 127]).max() <= 1
    clear = Image.new("LA", (32, 32), (0, 0))
    assert pixels(saved(clear, "PNG")).min() == 255
    palette = Image.new("P", (32, 32), 3)
    assert pixels(saved(palette, "GIF", transparency=3)).min() == 255
    assert pixels(saved(Image.new("RGB", (32, 32), (1, 2, 3)), "PNG", transparency=(1, 2, 3))).min() == 255


@pytest.mark.parametrize(
    ("mode", "kind"), [("1", "PNG"), ("L", "JPEG"), ("P", "PNG"), ("CMYK", "JPEG"), ("CMYK", "TIFF")]
)
def test_other_ways_to_store_colour(mode, kind):
    wanted = Image.new("RGB", (32, 32), "white")
    wanted.paste((0, 0, 0), (0, 0, 16, 32))
    found = decoded(saved(wanted.convert(mode), kind))
    assert found.mode == mode
    assert abs(np.asarray(found.square).astype(int) - np.asarray(wanted)).mean() < 4


def test_reduction_is_antialiased():
    """A fine chequerboard becomes grey, not a moiré; JPEG's own reduction included."""
    board = (np.indices((512, 512)).sum(0) % 2 * 255).astype(np.uint8)
    for kind in ("PNG", "JPEG"):
        grey = pixels(saved(Image.fromarray(board), kind), 48)
        assert abs(grey - 127.5).max() < 3, kind


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_cut_short_is_found_out(kind):
    if kind == "webp" and not features.check("webp"):
        pytest.skip("this Pillow has no WebP")
    content = encoded(5, kind, (300, 200))
    assert isinstance(decoded(content), Picture)
    for share in (0.05, 0.3, 0.6, 0.9):
        reason = decoded(content[: int(len(content) * share)])
        assert isinstance(reason, str), f"{kind} cut at {share:.0%} was taken for whole"
        assert reason
        assert "\n" not in reason
    assert decoded(b"") == "the file is empty"


@pytest.mark.parametrize("kind", FORMATS)
def test_fuzzed_files_end_as_a_picture_or_a_reason(kind):
    content = encoded(6, kind, (64, 48))
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(content)
        for place in rng.integers(0, len(damaged), rng.integers(1, 20)):
            damaged[place] = rng.integers(256)
        found = decoded(bytes(damaged))
        assert isinstance(found, str) or np.asarray(found.square).shape == (32, 32, 3)


def test_a_decompression_bomb_is_refused_by_its_declared_size():
    """50,000 × 50,000 pixels: 7.5 GB in memory, some kilobytes on the disk."""
    row = zlib.compressobj(9)
    data = b"".join(row.compress(bytes(10**6)) for _ in range(10)) + row.flush()

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    assert "2500000000 pixels" in decoded(bomb)
