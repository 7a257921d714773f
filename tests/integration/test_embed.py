"""embed and search: features of a folder with the names of its files, and what lies nearest."""

import csv
import os
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from onecrop import embed, load_backbone, search
from onecrop.augment import central_crop
from onecrop.cli import main
from onecrop.data import load
from onecrop.data.sources import Request
from onecrop.nets import build_backbone
from onecrop.nets.backbones import save_backbone
from tests.pictures import encoded, picture, write_pictures


@pytest.fixture
def backbone(tmp_path):
    """An untrained one: features are features."""
    torch.manual_seed(0)
    path = tmp_path / "backbone.safetensors"
    facts = {"backbone": "tiny", "stem": "small", "image_size": 16, "data": str(tmp_path / "photos"), "epoch": 0}
    save_backbone(path, build_backbone("tiny", "small"), facts)
    return path


@pytest.fixture
def photos(tmp_path):
    folder = write_pictures(tmp_path / "photos" / "train", 6).parent
    write_pictures(folder / "test", 3, first=6)
    (folder / "test" / 'new\nline é,".jpg').write_bytes(encoded(9, "jpg"))
    (folder / "test" / "bytes \udcff.jpg").write_bytes(encoded(10, "jpg"))
    (folder / "broken.jpg").write_bytes(b"x")
    return folder


def test_features_are_those_of_the_central_crops(backbone, photos):
    files, features = embed(backbone, str(photos))
    assert len(files) == len(features) == 11  # train and test parts alike
    images = load(str(photos), "all", Request(image_size=16))
    assert files == images.files
    crops = central_crop(torch.from_numpy(np.array(images.images)), torch.from_numpy(images.true_aspect), 16)
    expected = load_backbone(backbone)(crops).numpy()
    assert np.allclose(features, expected, atol=1e-5)


def test_npz(backbone, photos, tmp_path, capsys):
    out = tmp_path / "features.npz"
    assert main(["embed", str(backbone), str(photos), "--out", str(out)]) == 0
    assert f"{out}: 11 images, 256 features each" in capsys.readouterr().out
    files, features = embed(backbone, str(photos))
    with np.load(out, allow_pickle=False) as content:
        assert tuple(content["files"]) == files
        assert np.array_equal(content["features"], features)


def test_csv(backbone, photos, tmp_path):
    files, features = embed(backbone, str(photos), tmp_path / "f.csv")
    with open(tmp_path / "f.csv", newline="", encoding="utf-8", errors="surrogateescape") as file:
        header, *rows = csv.reader(file)
    assert header == ["file", *map(str, range(256))]
    assert tuple(row[0] for row in rows) == files
    assert np.allclose(np.array([row[1:] for row in rows], np.float32), features, rtol=1e-6)


def test_parquet(backbone, photos, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    files, features = embed(backbone, str(photos), tmp_path / "f.parquet")
    table = parquet.read_table(tmp_path / "f.parquet").to_pydict()
    assert np.allclose(np.array(table["features"], np.float32), features)
    assert [name for name in table["file"] if "\\udcff" not in name] == [n for n in files if "\udcff" not in n]


def test_a_missing_package_and_a_wrong_ending_are_said_before_the_work(backbone, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for out, words in (("f.parquet", "pip install 'onecrop[parquet]'"), ("f.txt", "end in .npz, .csv, .parquet")):
        assert main(["embed", str(backbone), str(tmp_path / "absent"), "--out", str(tmp_path / out)]) == 1
        assert words in capsys.readouterr().err
    assert main(["embed", str(tmp_path / "nowhere"), "shapes"]) == 1
    assert "no backbone at" in capsys.readouterr().err


def test_a_set_without_files_is_numbered(backbone):
    files, features = embed(backbone, "shapes")
    assert files[:3] == ("0", "1", "2")
    assert features.shape == (4000, 256)


def test_search_finds_the_copy_first(backbone, photos, tmp_path, capsys):
    query = tmp_path / "query.png"
    picture(4).save(query)
    out = tmp_path / "search.png"
    assert main(["search", str(backbone), str(query), "--out", str(out), "--count", "20"]) == 0  # more than there are
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if line[:2] in ("0.", "1.")]
    assert len(found) == 11
    assert found[0].endswith("train/00004.jpg")
    cosines = [float(line.split()[0]) for line in found]
    assert cosines == sorted(cosines, reverse=True)
    with Image.open(out) as sheet:
        assert sheet.width == 896
        assert np.asarray(sheet).std() > 10


def test_a_picture_of_the_folder_is_not_its_own_neighbour(backbone, photos, tmp_path):
    query = photos / "train" / "00002.jpg"
    (photos / "test" / "00002.jpg").write_bytes(query.read_bytes())
    found = search(backbone, query, out=tmp_path / "s.png", count=20)
    names = [os.path.relpath(file, photos) for _, file in found]
    assert found[0][0] == pytest.approx(1, abs=1e-5)
    assert names[0] == "test/00002.jpg"
    assert len(names) == 11  # all but itself
    assert "train/00002.jpg" not in names


def test_what_search_refuses(backbone, photos, tmp_path, capsys):
    for arguments, words in (
        ([str(photos / "broken.jpg")], "cannot read the image"),
        ([str(tmp_path / "absent.jpg")], "No such file"),
        ([str(photos / "train" / "00000.jpg"), "--count", "0"], "--count 0 is too small"),
        ([str(photos / "train" / "00000.jpg"), "--out", str(tmp_path / "s.jpg")], "let it end in .png"),
    ):
        assert main(["search", str(backbone), *arguments]) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["search", "evaluate"])
def test_images_that_have_moved_are_asked_for(backbone, photos, tmp_path, capsys, verb):
    query = tmp_path / "query.jpg"
    query.write_bytes(encoded(3, "jpg"))
    photos.rename(tmp_path / "elsewhere")
    assert main([verb, str(backbone), *([str(query)] if verb == "search" else [])]) == 1
    said = capsys.readouterr().err
    assert (
        said == f"onecrop: {photos}, which this backbone was pretrained on, is not there: name its images with --data\n"
    )


def test_search_in_a_set_of_another_size(backbone, tmp_path):
    """Named sets are stored as they are, files with a margin around what the network sees."""
    query = tmp_path / "query.png"
    picture(4).save(query)
    found = search(backbone, query, "shapes", tmp_path / "s.png", count=3)
    assert len(found) == 3
    assert (tmp_path / "s.png").exists()


def test_search_for_a_large_picture_warns_of_nothing(backbone, tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 150_000)  # Pillow warns from here on, and refuses at twice as many
    query = tmp_path / "query.png"
    picture(4).resize((500, 400)).save(query)
    assert len(search(backbone, query, "shapes", tmp_path / "s.png", count=1)) == 1
