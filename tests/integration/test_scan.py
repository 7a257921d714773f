"""onecrop scan: what it finds, what it says about it, and what it leaves behind."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from onecrop import Recipe
from onecrop.build import build_method
from onecrop.choices import resolve
from onecrop.cli import main
from onecrop.data import Loader, load
from onecrop.data.scan import scan
from onecrop.data.sources import Request
from onecrop.forecast import forecast_memory
from onecrop.methods.sid import SidSettings
from onecrop.survey import forecast, survey
from tests.pictures import FORMATS, encoded, picture, write_pictures

SMALL = SidSettings(dim=16, hidden=32)


@pytest.fixture
def mixed(tmp_path):
    """Twelve pictures, two copies byte for byte, three near ones, five broken files, a text and a link."""
    folder = write_pictures(tmp_path / "mixed", 12, size=(120, 90))
    (folder / "copies").mkdir()
    for number in (0, 1):
        (folder / "copies" / f"{number}.jpg").write_bytes(encoded(number, "jpg", (120, 90)))
    for number in (1, 5, 6):
        picture(number, (120, 90)).crop((1, 1, 119, 89)).save(folder / "copies" / f"near {number}.png")
    for kind in FORMATS:
        (folder / f"cut.{kind}").write_bytes(encoded(3, kind, (120, 90))[:-300])
    (folder / "notes.txt").write_text("hello")
    (folder / "link.jpg").symlink_to("00000.jpg")
    return folder


def test_what_a_scan_finds(mixed):
    facts = scan(mixed).facts()
    assert facts["images"] == 17
    assert facts["formats"] == {"JPEG": 14, "PNG": 3}
    assert facts["modes"] == {"RGB": 17}
    assert facts["width"] == {"least": 118, "median": 120, "most": 120}
    assert {os.path.splitext(one["name"])[1] for one in facts["broken"]} == {f".{kind}" for kind in FORMATS}
    assert facts["not_images"] == {".txt": 1}
    assert facts["passed_over"] == [{"name": "link.jpg", "reason": "a link, not followed"}]
    assert facts["groups"] == [
        {"kept": "00000.jpg", "exact": ["copies/0.jpg"], "near": []},
        {"kept": "00001.jpg", "exact": ["copies/1.jpg"], "near": ["copies/near 1.png"]},
        {"kept": "00005.jpg", "exact": [], "near": ["copies/near 5.png"]},
        {"kept": "00006.jpg", "exact": [], "near": ["copies/near 6.png"]},
    ]
    assert (facts["exact_duplicates"], facts["near_duplicates"]) == (2, 3)
    assert facts["pairs_pushed_apart"] == 1 + 3 + 1 + 1


def test_scan_and_pack_agree(mixed):
    """The same files are broken, the same pictures are dropped."""
    found = scan(mixed)
    packed = load(str(mixed), request=Request(image_size=28, drop_duplicates=True))
    repeats = {name for group in found.groups for name in (*group.exact, *group.near)}
    left_out = repeats | {skipped.name for skipped in found.broken}
    kept = [entry.name for entry in found.listing.entries if entry.name not in left_out]
    assert [os.path.relpath(file, mixed) for file in packed.files] == kept


def test_the_command(mixed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("onecrop.survey.forecast", lambda recipe, count: None)
    out = tmp_path / "out"
    assert main(["scan", str(mixed), "--out", str(out), "--json", str(out / "scan.json")]) == 0
    said = capsys.readouterr().out
    assert "17 (" in said
    assert "5 in 4 groups: 2 byte for byte, 3 nearly" in said
    assert "6 pairs of one and the same picture would be pushed apart" in said
    assert "29.4% of every epoch" in said
    lines = [line.split("\t") for line in (out / "findings.tsv").read_text().splitlines()]
    assert lines[0] == ["kind", "group", "file", "remark"]
    assert ["near", "2", "copies/near 1.png", "repeats 00001.jpg"] in lines
    assert sum(line[0] == "broken" for line in lines) == 5
    facts = json.loads((out / "scan.json").read_text())
    assert facts["images"] == 17
    with Image.open(out / "contact-sheet.png") as sheet:
        pixels = np.asarray(sheet.convert("RGB"))
    assert pixels.shape[1] == 896
    assert pixels.std() > 10
    assert main(["scan", str(mixed), "--out", str(out), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"] == facts["groups"]


def test_names_of_any_bytes_reach_list_and_sheet(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("onecrop.survey.forecast", lambda recipe, count: None)
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("日本語\n.jpg", "b\udcff\x1b[31m.jpg"):
        (folder / name).write_bytes(encoded(1, "jpg", (120, 90)))
    (folder / "broken\t\udce9.jpg").write_bytes(b"x")
    out = tmp_path / "out"
    survey(Recipe(data=str(folder)), out, str(out / "scan.json"))
    listed = (out / "findings.tsv").read_text().splitlines()
    assert listed[1].startswith("broken\t\tbroken\\t\\xe9.jpg\t")
    assert listed[2:] == ["original\t1\tb\\xff\\x1b[31m.jpg\t", "exact\t1\t日本語\\n.jpg\trepeats b\\xff\\x1b[31m.jpg"]
    assert json.loads((out / "scan.json").read_text())["groups"][0]["kept"] == "b\udcff\x1b[31m.jpg"
    assert "\x1b" not in capsys.readouterr().out


def test_an_archive_is_scanned_like_its_folder(mixed, tmp_path):
    (mixed / "link.jpg").unlink()
    archive = shutil.make_archive(str(tmp_path / "mixed"), "gztar", mixed)
    one, other = scan(mixed).facts(), scan(Path(archive)).facts()
    for name in ("images", "bytes", "formats", "exact_duplicates", "near_duplicates", "pairs_pushed_apart"):
        assert one[name] == other[name], name


def test_nothing_to_scan(tmp_path, capsys):
    assert main(["scan", str(tmp_path / "absent")]) == 1
    assert "is not a folder: give a folder or archive" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["scan", str(tmp_path / "empty"), "--out", str(tmp_path / "out")]) == 0
    assert "images       0" in capsys.readouterr().out
    assert main(["scan", str(tmp_path / "empty"), "--backbone", "resnet19"]) == 1
    assert "did you mean 'resnet18'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sid", "pid", "moco"])
def test_the_forecast_is_that_of_the_run(tmp_path, name):
    """The memory of a stand-in, put right for the number of images, is the memory that the run itself announces."""
    folder = write_pictures(tmp_path / "photos", 40)
    recipe = Recipe(data=str(folder), backbone="tiny", image_size=16, batch_size=8, epochs=3, settings=SMALL)
    recipe = recipe.override({"method": name, "precision": "float32"})
    found = forecast(recipe, 40)
    images = load(recipe.data, request=recipe.request())
    device = torch.device("cpu")
    recipe = resolve(recipe, images, device)
    method, loader = build_method(recipe, 40), Loader(images, 8, device, 0)
    assert found["memory"] == forecast_memory(method, loader, 16, torch.float32)
    assert found["pack"] == images.images.nbytes
    assert found["memory"]["bank"] == (40 * 16 * 4 if name == "sid" else 0)
    assert 0 < found["seconds"] < 600


def test_tables_too_large_to_try_are_not_timed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("onecrop.survey.TABLES_TO_TRY", 9 * 256 * 4 - 1)
    folder = write_pictures(tmp_path / "photos", 9)
    recipe = Recipe(data=str(folder), backbone="tiny", image_size=16, batch_size=4, settings=SMALL)
    assert forecast(recipe, 9)["seconds"] is not None  # a bank of 576 bytes
    recipe = recipe.override({"method": "pid"})
    assert survey(recipe, tmp_path / "out", None)["forecast"]["seconds"] is None
    assert "not measured: its tables are too large" in capsys.readouterr().out
