"""The long loops of packing; `make test` runs them at a small size."""

import time

import numpy as np

from onecrop.data import load
from onecrop.data.listing import list_folder
from onecrop.data.scan import scan
from onecrop.data.sources import Request
from tests.pictures import encoded, write_pictures
from tests.unit.test_pack import kill_while_packing


def test_thirty_kills(tmp_path, monkeypatch):
    """Broken files and copies among 2,000 pictures, killed at 30 random moments: the same bytes as if undisturbed."""
    folder = write_pictures(tmp_path / "photos", 2000, size=(400, 300))
    for number in range(0, 2000, 50):
        (folder / f"{number:05d} again.jpg").write_bytes(encoded(number, "jpg", (400, 300)))
        (folder / f"{number:05d} broken.jpg").write_bytes(encoded(number, "jpg", (400, 300))[:500])
    assert kill_while_packing(tmp_path, monkeypatch, folder, kills=30, drop=("drop",)) == 30


def test_two_hundred_thousand_files(tmp_path):
    """Ten thousand of them in one folder; every one another picture."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "photos"
    header = b"P6 8 8 255\n"
    for part in range(20):
        (folder / str(part)).mkdir(parents=True)
        pixels = rng.integers(0, 255, (10_000, 192), np.uint8)
        for number, content in enumerate(pixels):
            (folder / str(part) / f"{number}.ppm").write_bytes(header + content.tobytes())
    seconds = {}

    def timed(name, function):
        started = time.monotonic()
        result = function()
        seconds[name] = time.monotonic() - started
        return result

    assert len(timed("list", lambda: list_folder(folder)).entries) == 200_000
    request = Request(image_size=8)
    first = timed("pack", lambda: load(str(folder), request=request))
    again = timed("open", lambda: load(str(folder), request=request))
    assert len(first) == len(again) == 200_000
    assert first.fingerprint == again.fingerprint
    found = timed("scan", lambda: scan(folder))
    assert found.num_images == 200_000
    print({name: round(value, 1) for name, value in seconds.items()})
    assert seconds["list"] < 20
    assert seconds["open"] < 30
    assert seconds["pack"] < 300
    assert seconds["scan"] < 600
