"""What is found in a folder, under any name, and what is passed over."""

import os
import time

import pytest

from onecrop.data import load
from onecrop.data.listing import list_folder
from onecrop.data.sources import Request
from onecrop.errors import UserError
from onecrop.files import printable
from tests.pictures import encoded, write_pictures

REQUEST = Request(image_size=28)


def cached(tmp_path, name):
    (found,) = (tmp_path / "cache").glob(f"*/{name}")
    return found


@pytest.mark.skipif(os.name != "posix", reason="names of any bytes")
def test_names_in_any_script(tmp_path, capsys):
    folder = tmp_path / "photos"
    folder.mkdir()
    names = [
        "ελληνικά.jpg",
        "日本語 の 写真.JPG",
        "عربى.jpg",
        "🐈.jpeg",
        "new\nline.jpg",
        "tab\tand \\.jpg",
        "%s{0}'\".jpg",
    ]
    raw = [os.fsencode(name) for name in names] + [b"latin-\xe9\xff.jpg"]
    for number, name in enumerate(raw):
        (folder / os.fsdecode(name)).write_bytes(encoded(number, "jpg"))
    (folder / "broken\n\x1b[31m.jpg").write_bytes(b"x")
    images = load(str(folder), request=REQUEST)
    assert {os.path.basename(os.fsencode(file)) for file in images.files} == set(raw)
    listed = cached(tmp_path, "skipped.txt").read_text()
    assert listed == "broken\\n\\x1b[31m.jpg\tnot an image, or damaged in its first bytes\n"
    assert "\x1b" not in capsys.readouterr().out


def test_printable_names_can_be_told_apart():
    assert printable("a b é 日本 🐈") == "a b é 日本 🐈"
    assert printable("a\nb\\n\udce9\x1b\u202e") == "a\\nb\\\\n\\xe9\\x1b\\u202e"


@pytest.mark.skipif(os.name != "posix", reason="links and pipes")
def test_links_loops_and_pipes_are_not_followed(tmp_path, capsys):
    outside = write_pictures(tmp_path / "outside", 2, first=90)
    folder = write_pictures(tmp_path / "photos" / "a", 3).parent
    (folder / "loop").symlink_to(folder)
    (folder / "a" / "up").symlink_to("..")
    (folder / "out").symlink_to(outside)
    (folder / "one.jpg").symlink_to(outside / "00090.jpg")
    (folder / "twice.jpg").symlink_to("a/00000.jpg")
    (folder / "nowhere.jpg").symlink_to("nothing")
    os.mkfifo(folder / "pipe.jpg")
    listing = list_folder(folder)
    assert [entry.name for entry in listing.entries] == ["a/00000.jpg", "a/00001.jpg", "a/00002.jpg"]
    assert dict(listing.skipped) == {
        **dict.fromkeys(["loop", "a/up", "out", "one.jpg", "twice.jpg", "nowhere.jpg"], "a link, not followed"),
        "pipe.jpg": "not a regular file",
    }
    assert len(load(str(folder), request=REQUEST)) == 3
    assert "a/up (a link, not followed) and 6 more passed over" in capsys.readouterr().out
    linked = tmp_path / "link to photos"
    linked.symlink_to(folder)  # what was asked for by name is followed
    assert len(load(str(linked), request=REQUEST)) == 3
    (tmp_path / "only links").mkdir()
    (tmp_path / "only links" / "a").symlink_to(outside)
    with pytest.raises(UserError, match=r"no images found below .*only links: a \(a link, not followed\)"):
        load(str(tmp_path / "only links"))


def test_an_unreadable_sub_folder_is_named(tmp_path, monkeypatch, capsys):
    folder = write_pictures(tmp_path / "photos", 2)
    write_pictures(folder / "private", 2, first=5)
    honest = os.scandir

    def closed(path):
        if str(path).rstrip("/").endswith("private"):
            raise PermissionError(13, "Permission denied")
        return honest(path)

    monkeypatch.setattr(os, "scandir", closed)  # file modes do not stop root
    assert len(load(str(folder), request=REQUEST)) == 2
    assert "private/ (the folder cannot be read: Permission denied) passed over" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setenv("ONECROP_CACHE", str(tmp_path / "cache"))
    assert len(load(str(folder), request=REQUEST)) == 4


def test_a_file_that_cannot_be_opened_is_left_out(tmp_path, monkeypatch):
    folder = write_pictures(tmp_path / "photos", 3)
    listing = list_folder(folder)
    (folder / "00001.jpg").unlink()  # between listing and decoding
    monkeypatch.setattr("onecrop.data.sources.list_folder", lambda root: listing)
    assert len(load(str(folder), request=REQUEST)) == 2
    assert "No such file" in cached(tmp_path, "skipped.txt").read_text()


def test_many_tiny_files(tmp_path):
    """The soak test does this with 200,000: listing and addressing must not grow faster than the count."""
    content = encoded(1, "jpg", (8, 8))
    for part in range(20):
        (tmp_path / "photos" / str(part)).mkdir(parents=True)
        for number in range(100):
            (tmp_path / "photos" / str(part) / f"{number}.jpg").write_bytes(content)
    started = time.monotonic()
    assert len(list_folder(tmp_path / "photos").entries) == 2000
    assert time.monotonic() - started < 1
    assert len(load(str(tmp_path / "photos"), request=Request(image_size=8))) == 2000


def test_photographs_in_formats_that_are_not_read_are_named(tmp_path, capsys):
    """A phone's folder: half of its pictures would be missing without a word."""
    folder = tmp_path / "phone"
    folder.mkdir()
    for name in ("a.HEIC", "b.heic", "c.DNG", "notes.txt"):
        (folder / name).write_bytes(b"x")
    with pytest.raises(UserError, match=r"no images found below .*phone: 2 \.heic, 1 \.dng are not read: convert to"):
        load(str(folder), request=REQUEST)
    write_pictures(folder, 2)
    assert len(load(str(folder), request=REQUEST)) == 2
    assert f"{folder}: 2 .heic, 1 .dng are not read: convert to .jpg first" in capsys.readouterr().out
