"""Packing: what is left out, and that nothing is lost, whatever happens on the way."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from onecrop.data import Loader, load
from onecrop.data import pack as packing
from onecrop.data.parallel import TASK, in_parallel
from onecrop.data.sources import Request
from onecrop.errors import UserError
from tests.pictures import encoded, picture, write_pictures

REQUEST = Request(image_size=28)
PACK = (
    "import sys, onecrop.data.pack as p; from onecrop.data import load; from onecrop.data.sources import Request;"
    "p.MARK_SECONDS = float(sys.argv[2]);"
    "images = load(sys.argv[1], request=Request(image_size=28, drop_duplicates=len(sys.argv) > 3));"
    "print(len(images), images.fingerprint)"
)


def pack_process(folder, mark_seconds=0.0, *more):
    command = [sys.executable, "-c", PACK, str(folder), str(mark_seconds), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def cached(tmp_path, name):
    (found,) = (tmp_path / "cache").glob(f"*/{name}")
    return found


def test_near_duplicates_are_dropped_on_request(tmp_path, capsys):
    folder = write_pictures(tmp_path / "photos", 6, size=(120, 90))
    for number in (1, 4):
        picture(number, (120, 90)).resize((60, 45)).save(folder / f"{number:05d}b.jpg", quality=60)
    whole = load(str(folder), request=REQUEST)
    assert len(whole) == 8
    for _ in range(2):
        images = load(str(folder), request=Request(image_size=28, drop_duplicates=True))
        assert [os.path.basename(file) for file in images.files] == [f"{number:05d}.jpg" for number in range(6)]
        assert "2 near-duplicates are dropped" in capsys.readouterr().out
    assert cached(tmp_path, "skipped.txt").read_text().splitlines()[0] == "00001b.jpg\trepeats 00001.jpg"
    assert images.fingerprint != whole.fingerprint


def test_the_fingerprint_is_that_of_the_kept_pixels(tmp_path):
    """Files that are left out leave no trace in it: removing them later does not make another data set."""
    folder = write_pictures(tmp_path / "photos", 5)
    whole = load(str(folder), request=REQUEST)
    (folder / "00002b.jpg").write_bytes(b"rubbish")
    assert load(str(folder), request=REQUEST).fingerprint == whole.fingerprint
    os.utime(folder / "00001.jpg")
    assert load(str(folder), request=REQUEST).fingerprint == whole.fingerprint
    (folder / "00001.jpg").write_bytes(encoded(77, "jpg"))
    assert load(str(folder), request=REQUEST).fingerprint != whole.fingerprint


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_pack_goes_on_where_it_was(tmp_path, monkeypatch):
    """The soak test does this 30 times."""
    folder = write_pictures(tmp_path / "photos", 150, size=(400, 300))
    for number in range(0, 150, 10):
        (folder / f"{number:05d} again.jpg").write_bytes(encoded(number, "jpg", (400, 300)))
        (folder / f"{number:05d} broken.jpg").write_bytes(encoded(number, "jpg", (400, 300))[:500])
    assert kill_while_packing(tmp_path, monkeypatch, folder, kills=1, drop=("drop",)) == 1


def kill_while_packing(tmp_path, monkeypatch, folder, kills, drop=()):
    """Kill it `kills` times while it packs; what comes of it is what an undisturbed pack would have been."""
    with monkeypatch.context() as patch:
        patch.setenv("ONECROP_CACHE", str(tmp_path / "undisturbed"))
        undisturbed = load(str(folder), request=Request(image_size=28, drop_duplicates=bool(drop)))
    rng, places = np.random.default_rng(0), []
    for number in range(kills):
        process = pack_process(folder, 0.0, *drop)
        before = places[-1] if places else 0
        wanted = before + int(rng.integers(1, 150_000))  # bytes of rows beyond those of the last time
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if (found := list((tmp_path / "cache").glob("*/images.bin"))) and found[0].stat().st_size > wanted:
                time.sleep(rng.uniform(0, 0.02))
                break
            time.sleep(0.0005)
        assert process.poll() is None, f"it ended before kill {number}: {process.communicate()}"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        places.append(cached(tmp_path, "images.bin").stat().st_size)
        assert not list((tmp_path / "cache").glob("*/pack.json"))
    journal = cached(tmp_path, "journal.jsonl").read_text()
    assert '"next": ' in journal
    output, errors = pack_process(folder, 0.0, *drop).communicate()
    assert output.splitlines()[-1] == f"{len(undisturbed)} {undisturbed.fingerprint}", errors
    for name in ("images.bin", "pack.json", "skipped.txt"):
        (one,) = (tmp_path / "undisturbed").glob(f"*/{name}")
        assert one.read_bytes() == cached(tmp_path, name).read_bytes(), name
    assert not list((tmp_path / "cache").glob("*/journal.jsonl"))
    return len(places)


def test_what_was_packed_before_is_not_decoded_again(tmp_path, monkeypatch):
    folder = write_pictures(tmp_path / "photos", 200)
    honest, calls, broken = (
        packing.decode,
        [],
        [sorted(folder.rglob("*.jpg"))[150]],
    )  # in the fifth task: four come before it

    def failing(opener, size):
        calls.append(opener)
        if any(str(path) in opener.args for path in broken):
            raise RuntimeError("stopped")
        return honest(opener, size)

    monkeypatch.setattr(packing, "MARK_SECONDS", 0.0)
    monkeypatch.setattr(packing, "decode", failing)
    with pytest.raises(RuntimeError, match="stopped"):
        load(str(folder), request=REQUEST)
    calls.clear()
    broken.clear()
    images = load(str(folder), request=REQUEST)
    assert len(images) == 200
    assert len(calls) == 200 - 4 * TASK
    monkeypatch.setenv("ONECROP_CACHE", str(tmp_path / "other"))
    assert load(str(folder), request=REQUEST).fingerprint == images.fingerprint


def test_a_torn_journal_and_lost_rows(tmp_path, monkeypatch):
    """A crash of the whole machine may cut the journal, or leave it without its rows."""
    folder = write_pictures(tmp_path / "photos", 40)
    expected = np.array(load(str(folder), request=REQUEST).images)
    pack = cached(tmp_path, "pack.json").parent

    def interrupted():
        monkeypatch.setattr(packing, "MARK_SECONDS", 0.0)
        (pack / "pack.json").unlink()
        monkeypatch.setattr(packing._Packing, "_finish", lambda self: {}["stopped"])
        with pytest.raises(KeyError, match="stopped"):
            load(str(folder), request=REQUEST)
        monkeypatch.undo()
        monkeypatch.setenv("ONECROP_CACHE", str(tmp_path / "cache"))

    def break_a_line_in_the_middle():
        first, _, *rest = (pack / "journal.jsonl").read_text().splitlines()
        assert rest
        (pack / "journal.jsonl").write_text("\n".join([first, '{"next":', *rest, ""]))

    for damage in (
        lambda: (pack / "journal.jsonl").write_bytes((pack / "journal.jsonl").read_bytes()[:-30]),
        break_a_line_in_the_middle,
        lambda: (pack / "journal.jsonl").write_bytes(b'{"other": 1}\n'),
        lambda: (pack / "images.bin").write_bytes(b"short"),
        lambda: (pack / "images.bin").unlink(),
    ):
        interrupted()
        damage()
        assert np.array_equal(load(str(folder), request=REQUEST).images, expected)


def test_two_processes_pack_one_folder(tmp_path):
    folder = write_pictures(tmp_path / "photos", 250, size=(300, 200))
    processes = [pack_process(folder, 0.0) for _ in range(2)]
    results = [process.communicate() for process in processes]
    assert len({output.splitlines()[-1] for output, _ in results}) == 1, results
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_the_second_process_waits_for_the_first(tmp_path, monkeypatch, capsys):
    folder = write_pictures(tmp_path / "photos", 8)
    honest, begun, go_on, counts = packing.decode, threading.Event(), threading.Event(), []

    def slow(opener, size):
        begun.set()
        assert go_on.wait(30)
        counts.append(1)
        return honest(opener, size)

    monkeypatch.setattr(packing, "decode", slow)
    first = threading.Thread(target=load, args=(str(folder),), kwargs={"request": REQUEST})
    first.start()
    assert begun.wait(30)
    second = threading.Thread(target=load, args=(str(folder),), kwargs={"request": REQUEST})
    second.start()
    deadline = time.monotonic() + 30
    said = ""
    while "another process is packing it; waiting" not in said:
        assert time.monotonic() < deadline
        said += capsys.readouterr().out
        time.sleep(0.01)
    go_on.set()
    first.join()
    second.join()
    assert len(counts) == 8


class FullDisk:
    """A file on a disk with room for so many bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, content):
        self.room -= len(content)
        if self.room < 0:
            raise OSError(28, "No space left on device")
        return self.file.write(content)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_disk_that_fills_up_while_packing(tmp_path, monkeypatch):
    folder = write_pictures(tmp_path / "photos", 100)
    honest = packing._Packing._append_rows
    monkeypatch.setattr(packing, "MARK_SECONDS", 0.0)
    monkeypatch.setattr(packing._Packing, "_append_rows", lambda self, file: honest(self, FullDisk(file, 200_000)))
    with pytest.raises(UserError, match=r"No space left on device\): what is packed so far is kept; make room"):
        load(str(folder), request=REQUEST)
    journal = cached(tmp_path, "journal.jsonl").read_text().splitlines()
    assert len(journal) > 1
    monkeypatch.setattr(packing._Packing, "_append_rows", honest)  # with room again
    honest_decode, count = packing.decode, []
    monkeypatch.setattr(packing, "decode", lambda *a: (count.append(1), honest_decode(*a))[1])
    assert len(load(str(folder), request=REQUEST)) == 100
    assert len(count) < 100


def test_a_disk_without_room_is_refused_before_anything_is_decoded(tmp_path, monkeypatch):
    folder = write_pictures(tmp_path / "photos", 10)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 1000}))
    monkeypatch.setattr(packing, "decode", lambda *a: pytest.fail("decoded"))
    with pytest.raises(UserError, match=r"packing 10 images at 32 px needs 30.7 kB, but .* has 1 kB free"):
        load(str(folder), request=REQUEST)


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    folder = write_pictures(tmp_path / "photos", 2)
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONECROP_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot write the pack .*ONECROP_CACHE"):
        load(str(folder), request=REQUEST)


def test_a_bomb_and_an_odd_shape_among_good_pictures(tmp_path):
    folder = write_pictures(tmp_path / "photos", 3)
    header = encoded(1, "png")
    huge = (50_000).to_bytes(4, "big")
    (folder / "bomb.png").write_bytes(header[:16] + huge + huge + header[24:])
    Image.new("RGB", (2000, 1)).save(folder / "thin.png")
    images = load(str(folder), request=REQUEST)
    assert len(images) == 4
    assert images.aspect.max() == 2000
    assert cached(tmp_path, "skipped.txt").read_text().startswith("bomb.png\t")


def test_as_many_threads_as_cores_that_are_ours(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3}, raising=False)
    threads = set()

    def work(items):
        threads.add(threading.get_ident())
        time.sleep(0.01)
        return items

    assert [i for items in in_parallel(work, range(300)) for i in items] == list(range(300))
    assert len(threads) == 1


def test_a_pack_beyond_the_memory_can_be_opened(tmp_path):
    """Most file systems store no zeros: 200 GB of them take no room. A map that could be written to would need all."""
    size, count = 4096, 4000
    with (tmp_path / "images.bin").open("wb") as file:
        try:
            file.truncate(3 * size**2 * count)
        except OSError:
            pytest.skip("no room for a file of zeros")
    facts = {"kept": list(range(count)), "aspect": [1.0] * count, "size": size, "pixels": "0" * 32}
    listing = SimpleNamespace(path=str)
    images = packing._open("large", tmp_path, facts, listing, range(count))
    loader = Loader(images, 2, torch.device("cpu"), 0)  # without a warning, which would be an error here
    assert loader.batch(0).images.shape == (2, 3, size, size)
    assert not images.images.flags.writeable
