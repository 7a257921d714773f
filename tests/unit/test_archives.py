"""Archives are read in place; what tries to leave its folder, or to grow out of all bounds, is refused."""

import gzip
import io
import os
import struct
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest

from onecrop.data import archives, load
from onecrop.data.sources import Request, load_labelled
from onecrop.errors import UserError
from tests.pictures import encoded, write_pictures

REQUEST = Request(image_size=28)
MODES = {".tar": "w", ".tar.gz": "w:gz", ".tgz": "w:gz", ".tar.bz2": "w:bz2", ".tar.xz": "w:xz"}


def make(path, members):
    """{name: bytes} -> an archive of the kind that its name says."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return path
    ending = next(ending for ending in MODES if path.name.endswith(ending))
    with tarfile.open(path, MODES[ending]) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("ending", [".zip", *MODES])
def test_an_archive_is_like_its_folder(tmp_path, ending, monkeypatch):
    folder = tmp_path / "photos"
    for number, label in enumerate(("cat", "dog")):
        write_pictures(folder / label, 4, first=10 * number)
    (folder / "dog" / "broken.jpg").write_bytes(b"rubbish")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    members = {f"./photos/{path.relative_to(folder)}": path.read_bytes() for path in files}
    members |= {"photos/notes.txt": b"hello", "__MACOSX/photos/cat/._00000.jpg": b"x", "photos/.hidden/a.jpg": b"x"}
    archive = make(tmp_path / f"photos{ending}", members)
    before = sorted(tmp_path.rglob("*"))
    packed, expected = load(str(archive), request=REQUEST), load(str(folder), request=REQUEST)
    assert packed.fingerprint == expected.fingerprint
    assert packed.classes == ("cat", "dog")
    assert np.array_equal(packed.labels, expected.labels)
    assert packed.files[0] == f"{archive}/photos/cat/00000.jpg"
    unpacked = [path for path in tmp_path.rglob("*") if path not in before and "cache" not in path.parts]
    assert not unpacked
    monkeypatch.setattr("onecrop.data.pack.decode", lambda *a: pytest.fail("decoded twice"))
    assert load(str(archive), request=REQUEST).fingerprint == packed.fingerprint
    with pytest.raises(UserError, match="has no test part"):
        load(str(archive), "test", REQUEST)
    train, test, _ = load_labelled(str(archive), REQUEST)
    assert (len(train), len(test), test.classes) == (6, 2, ("cat", "dog"))


@pytest.mark.parametrize("ending", [".zip", ".tar.gz"])
def test_a_subset_of_an_archive(tmp_path, ending):
    archive = make(tmp_path / f"a{ending}", {f"{n}.jpg": encoded(n, "jpg") for n in range(30)})
    request = Request(image_size=28, subset=7)
    images = load(str(archive), request=request)
    assert len(images) == 7
    numbers = [int(os.path.basename(file).removesuffix(".jpg")) for file in images.files]
    alone = make(tmp_path / f"b{ending}", {f"{n}.jpg": encoded(n, "jpg") for n in numbers})
    assert np.array_equal(load(str(alone), request=REQUEST).images, images.images)


@pytest.mark.parametrize("ending", [".zip", ".tar", ".tar.gz"])
@pytest.mark.parametrize(
    "name", ["../out.jpg", "a/../../out.jpg", "/etc/out.jpg", "C:\\out.jpg", "..\\out.jpg", "\\out.jpg"]
)
def test_names_that_leave_the_folder_are_refused(tmp_path, ending, name):
    archive = make(tmp_path / f"bad{ending}", {"good.jpg": encoded(1, "jpg"), name: encoded(2, "jpg")})
    with pytest.raises(UserError, match=r"bad\S* is refused: its member '.*out\.jpg' would lie outside"):
        load(str(archive), request=REQUEST)


@pytest.mark.parametrize("ending", [".tar", ".tar.gz"])
def test_links_and_devices_in_a_tar_are_not_followed(tmp_path, ending, capsys):
    archive = tmp_path / f"links{ending}"
    with tarfile.open(archive, MODES[ending]) as tar:
        content = encoded(1, "jpg")
        info = tarfile.TarInfo("real.jpg")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
        for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(f"other{number}.jpg")
            info.type, info.linkname = kind, "/etc/passwd" if kind == tarfile.SYMTYPE else "real.jpg"
            tar.addfile(info)
    assert len(load(str(archive), request=REQUEST)) == 1
    assert "other0.jpg (a link, not followed) and 3 more passed over" in capsys.readouterr().out


def test_the_parts_of_an_archive_are_no_classes(tmp_path):
    members = {
        f"{part}/{label}/{n}.jpg": encoded(n, "jpg") for part in ("train", "val") for label in "ab" for n in (1, 2)
    }
    archive = make(tmp_path / "a.zip", members)
    with pytest.raises(UserError, match="has no labels"):
        load_labelled(str(archive), REQUEST)
    assert len(load(str(archive), request=REQUEST)) == 8


def test_links_in_a_zip_are_not_followed(tmp_path, capsys):
    archive = make(tmp_path / "a.zip", {"real.jpg": encoded(1, "jpg")})
    with zipfile.ZipFile(archive, "a") as file:
        link = zipfile.ZipInfo("link.jpg")
        link.external_attr = 0o120777 << 16
        file.writestr(link, "/etc/passwd")
    assert len(load(str(archive), request=REQUEST)) == 1
    assert "link.jpg (a link, not followed) passed over" in capsys.readouterr().out


@pytest.mark.parametrize("ending", [".zip", ".tar", ".tar.gz"])
def test_of_two_members_with_one_name_the_last_counts(tmp_path, ending):
    archive = tmp_path / f"twice{ending}"
    if ending == ".zip":
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("a.jpg", encoded(1, "jpg"))
            with pytest.warns(UserWarning, match="Duplicate name"):
                file.writestr("a.jpg", encoded(2, "jpg"))
    else:
        with tarfile.open(archive, MODES[ending]) as tar:
            for number in (1, 2):
                content = encoded(number, "jpg")
                info = tarfile.TarInfo("a.jpg")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    alone = make(tmp_path / "alone.zip", {"a.jpg": encoded(2, "jpg")})
    assert np.array_equal(load(str(archive), request=REQUEST).images, load(str(alone), request=REQUEST).images)


def test_a_member_that_declares_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MEMBER_LIMIT", 100_000)
    bomb = {"good.jpg": encoded(1, "jpg"), "bomb.bmp": bytes(200_000)}
    for ending in (".zip", ".tar", ".tar.gz"):
        archive = make(tmp_path / f"bomb{ending}", bomb)
        with pytest.raises(UserError, match=r"refused: its member 'bomb\.bmp' declares 200 kB, .* may have 100 kB"):
            load(str(archive), request=REQUEST)


def test_an_archive_that_declares_too_much_in_all(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "FREE_BYTES", 10_000)
    monkeypatch.setattr(archives, "RATIO_LIMIT", 20)
    for ending in (".zip", ".tar.gz"):
        archive = make(tmp_path / f"bomb{ending}", {f"{n}.bmp": bytes(100_000) for n in range(20)})
        with pytest.raises(UserError, match=r"is refused: it unpacks to more than"):
            load(str(archive), request=REQUEST)


def test_a_stream_that_grows_beyond_what_any_header_says(tmp_path, monkeypatch):
    """Behind the members a tar may go on with zeros for ever; they are counted as they come."""
    monkeypatch.setattr(archives, "FREE_BYTES", 10_000)
    monkeypatch.setattr(archives, "RATIO_LIMIT", 20)
    header = tarfile.TarInfo("notes.txt")
    header.size = 5 * 10**6
    with gzip.open(tmp_path / "a.tar.gz", "wb") as file:
        file.write(header.tobuf() + bytes(5 * 10**6))
    with pytest.raises(UserError, match="is refused: it unpacks to more than"):
        load(str(tmp_path / "a.tar.gz"), request=REQUEST)


def test_a_member_that_lies_about_its_size(tmp_path):
    """It declares 1,000 bytes and holds 50 MB: it is read no further than declared, and fails its check sum."""
    archive = make(tmp_path / "lies.zip", {"good.jpg": encoded(1, "jpg"), "liar.bmp": bytes(50 * 10**6)})
    content = bytearray(archive.read_bytes())
    for place in range(len(content) - 46):
        signature = content[place : place + 4]
        offset = {b"PK\x03\x04": 22, b"PK\x01\x02": 24}.get(bytes(signature))
        if offset and struct.unpack_from("<I", content, place + offset)[0] == 50 * 10**6:
            struct.pack_into("<I", content, place + offset, 1000)
    archive.write_bytes(content)
    tracemalloc.start()
    images = load(str(archive), request=REQUEST)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(images) == 1
    assert peak < 10 * 10**6
    (listed,) = (tmp_path / "cache").glob("*/skipped.txt")
    assert "liar.bmp\tBad CRC-32" in listed.read_text()


def test_a_method_that_cannot_be_bounded_is_left_out(tmp_path, capsys):
    archive = make(tmp_path / "a.zip", {"good.jpg": encoded(1, "jpg")})
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_LZMA) as file:
        file.writestr("lzma.jpg", encoded(2, "jpg"))
    assert len(load(str(archive), request=REQUEST)) == 1
    assert "lzma.jpg (packed by a method other than deflate) passed over" in capsys.readouterr().out


@pytest.mark.parametrize("ending", [".zip", *MODES])
def test_damaged_archives(tmp_path, ending):
    whole = make(
        tmp_path / f"whole{ending}", {f"{n}.jpg": encoded(n, "jpg", (200, 150)) for n in range(9)}
    ).read_bytes()
    bad = tmp_path / f"bad{ending}"
    for content in (b"", b"rubbish" * 500, whole[: len(whole) // 2]):
        bad.write_bytes(content)
        with pytest.raises(UserError, match=r"bad\S* cannot be read|no images found below"):
            load(str(bad), request=REQUEST)


@pytest.mark.parametrize("ending", [".tar", ".tar.gz"])
def test_a_damaged_header_in_the_middle(tmp_path, ending):
    """tarfile would take it for the end of the archive."""
    content = bytearray(make(tmp_path / "a.tar", {f"{n}.jpg": encoded(n, "jpg") for n in range(4)}).read_bytes())
    place = content.index(b"2.jpg\0")
    for damaged in (content[:place] + b"X" * 20 + content[place + 20 :], content[: place + 100]):
        bad = tmp_path / f"bad{ending}"
        bad.write_bytes(gzip.compress(damaged) if ending == ".tar.gz" else damaged)
        with pytest.raises(UserError, match="cannot be read as an archive"):
            load(str(bad), request=REQUEST)


def test_an_archive_that_breaks_between_listing_and_reading(tmp_path):
    members = {f"{n}.jpg": encoded(n, "jpg", (200, 150)) for n in range(9)}
    archive = make(tmp_path / "a.tar.gz", members)
    listing = archives.list_archive(archive)
    content = bytearray(archive.read_bytes())
    content[len(content) // 2 :] = b"\xff" * (len(content) - len(content) // 2)
    archive.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as an archive"):
        list(listing.openers(listing.entries))


def test_an_archive_without_images(tmp_path):
    archive = make(tmp_path / "a.zip", {"notes.txt": b"hello"})
    with pytest.raises(UserError, match="no images found below"):
        load(str(archive), request=REQUEST)
    with pytest.raises(UserError, match=r"give a folder or archive \(\.zip, \.tar"):
        load(str(tmp_path / "absent.zip"))
