"""Decode image files once, into one uint8 memory map [N, 3, R, R] of squares with the true aspect ratio beside it.

A pack is addressed by the files it was made from (root, names, sizes, times), R and whether duplicates are dropped:
the second run on the same folder starts at once, and a changed folder gets a new pack. Its fingerprint is that of the
pixels.

While it is made, rows are appended to images.bin, and every two seconds, once they are on the disk, a line of
journal.jsonl says how far it got: a kill or a full disk costs those two seconds. pack.json is written last and makes it
a pack.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from onecrop.data.decode import Opener, Picture, decode
from onecrop.data.duplicates import Looks, Originals, look_at
from onecrop.data.images import ImageSet
from onecrop.data.listing import Entry, Listing
from onecrop.data.parallel import in_parallel
from onecrop.errors import UserError
from onecrop.files import locked, printable, read_json_lines, write_atomically
from onecrop.progress import Progress, duration, readable

FORMAT = 2  # of the pack; a change of decoding or layout raises it
MARK_SECONDS = 2.0  # between two lines of the journal


def cache_folder() -> Path:
    return Path(os.environ.get("ONECROP_CACHE") or Path.home() / ".cache" / "onecrop")


class PackSettings(NamedTuple):
    size: int  # R
    drop_duplicates: bool = False


def pack(name: str, listing: Listing, entries: Sequence[Entry], settings: PackSettings) -> tuple[ImageSet, list[int]]:
    """-> ImageSet over a memory map, without labels, and which of `entries` are in it."""
    folder = cache_folder() / _address(listing, entries, settings)
    try:
        facts = _facts(folder)
        if facts is None:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / "lock", lambda: print(f"{name}: another process is packing it; waiting", flush=True)):
                facts = _facts(folder) or _Packing(folder, listing, entries, settings).run()
        images = _open(name, folder, facts, listing, entries)
    except OSError as error:
        raise UserError(
            f"cannot write the pack {folder} ({error.strerror}): what is packed so far is kept; make room or set "
            "ONECROP_CACHE to a disk with room, and run the same command again"
        ) from None
    _say(name, folder, facts)
    return images, facts["kept"]


def _address(listing: Listing, entries: Sequence[Entry], settings: PackSettings) -> str:
    digest = hashlib.blake2b(f"{FORMAT} {settings.size} {settings.drop_duplicates}\n".encode(), digest_size=16)
    digest.update(os.fsencode(listing.root.resolve()))
    for entry in entries:
        digest.update(b"\0" + entry.name.encode("utf-8", "surrogateescape") + f"\0{entry.size}\0{entry.time}".encode())
    return digest.hexdigest()


def _facts(folder: Path) -> dict[str, Any] | None:
    """What pack.json says of a whole pack; None where there is none, or a damaged one."""
    try:
        facts: dict[str, Any] = json.loads((folder / "pack.json").read_bytes())
        whole = (folder / "images.bin").stat().st_size == len(facts["kept"]) * 3 * facts["size"] ** 2
        return facts if whole and len(facts["aspect"]) == len(facts["kept"]) and facts["pixels"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _open(name: str, folder: Path, facts: dict[str, Any], listing: Listing, entries: Sequence[Entry]) -> ImageSet:
    shape = (len(facts["kept"]), 3, facts["size"], facts["size"])
    return ImageSet(
        name,
        # read-only: of a map that could be written to, systems want to see all of it in memory
        np.memmap(folder / "images.bin", np.uint8, mode="r", shape=shape),
        aspect=np.array(facts["aspect"], np.float32),
        files=tuple(listing.path(entries[i]) for i in facts["kept"]),
        key=facts["pixels"],
    )


def _say(name: str, folder: Path, facts: dict[str, Any]) -> None:
    parts = [
        f"{count:,} {one if count == 1 else more}"
        for count, one, more in (
            (facts["unreadable"], "file cannot be read and is left out", "files cannot be read and are left out"),
            (facts["repeats"], "near-duplicate is dropped", "near-duplicates are dropped"),
        )
        if count
    ]
    if parts:
        print(f"{name}: {', '.join(parts)}; listed in {folder / 'skipped.txt'}", flush=True)


class _Row(NamedTuple):
    pixels: bytes  # [3, R, R]
    aspect: float
    digest: bytes


def _decode_all(openers: list[Opener], settings: PackSettings) -> tuple[list[_Row | str], Looks | None]:
    """Rows, or why there is none; and how they look, where that is asked for."""
    pictures = [decode(opener, settings.size) for opener in openers]
    rows = [picture if isinstance(picture, str) else _row(picture) for picture in pictures]
    squares = [picture.square for picture in pictures if isinstance(picture, Picture)]
    return rows, look_at(squares) if settings.drop_duplicates else None


def _row(picture: Picture) -> _Row:
    pixels = b"".join(picture.square.tobytes("raw", band) for band in "RGB")
    return _Row(pixels, picture.width / picture.height, hashlib.sha256(pixels).digest())


@dataclass
class _Done:
    """Entries that were dealt with, from some point on: a line of the journal."""

    next: int = 0  # entry to go on with
    digest: str = ""  # of all rows up to here: a chain over those of the single rows
    kept: list[int] = field(default_factory=list)
    aspect: list[float] = field(default_factory=list)
    unreadable: list[tuple[int, str]] = field(default_factory=list)
    repeats: list[tuple[int, int]] = field(default_factory=list)  # entry, and the row it repeats

    def extend(self, later: "_Done") -> None:
        self.next, self.digest = later.next, later.digest
        for name in ("kept", "aspect", "unreadable", "repeats"):
            getattr(self, name).extend(getattr(later, name))


class _Packing:
    """A pack in the making."""

    def __init__(self, folder: Path, listing: Listing, entries: Sequence[Entry], settings: PackSettings) -> None:
        self.folder, self.listing, self.entries, self.settings = folder, listing, entries, settings
        self.journal, self.images = folder / "journal.jsonl", folder / "images.bin"
        self.row_bytes = 3 * settings.size**2
        self.originals = Originals()

    def run(self) -> dict[str, Any]:
        (self.folder / "pack.json").unlink(missing_ok=True)  # of a damaged pack
        self.done = self._earlier()
        self._need_room()
        with self.images.open("r+b" if self.done.kept else "wb") as images:
            images.truncate(len(self.done.kept) * self.row_bytes)  # rows behind the last mark may be torn
            if self.settings.drop_duplicates:
                self._look_at_earlier(images)
            images.seek(0, os.SEEK_END)
            self._append_rows(images)
        if not self.done.kept:
            number, reason = self.done.unreadable[0]
            first = f"{printable(self.entries[number].name)} ({reason})"
            raise UserError(f"none of the {len(self.entries):,} images below {self.listing.root} can be read: {first}")
        return self._finish()

    def _earlier(self) -> _Done:
        """What an interrupted pack left behind, to the last mark whose rows are all there."""
        done = _Done()
        try:
            for mark in read_json_lines(self.journal):
                done.extend(_Done(**mark))
            lines_missing = done.next != len(done.kept) + len(done.unreadable) + len(done.repeats)
            if lines_missing or (done.kept and self.images.stat().st_size < len(done.kept) * self.row_bytes):
                done = _Done()
        except (TypeError, FileNotFoundError):
            done = _Done()
        # as one whole line: the last one may have been cut short
        write_atomically(self.journal, (json.dumps(asdict(done)) + "\n").encode())
        return done

    def _need_room(self) -> None:
        needed = (len(self.entries) - self.done.next) * self.row_bytes
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise UserError(
                f"packing {len(self.entries):,} images at {self.settings.size} px needs {readable(needed)}, but "
                f"{self.folder.parent} has {readable(free)} free: set ONECROP_CACHE to a larger disk, "
                "or pass a lower --image-size"
            )

    def _look_at_earlier(self, images: BinaryIO) -> None:
        """The originals of an interrupted pack, seen again from its rows."""
        if not self.done.kept:
            return
        shape = (len(self.done.kept), 3, self.settings.size, self.settings.size)
        rows = np.memmap(images, np.uint8, mode="r", shape=shape)

        def seen_again(numbers: list[int]) -> Looks:
            return look_at([Image.fromarray(rows[n].transpose(1, 2, 0)) for n in numbers])

        for looks in in_parallel(seen_again, range(len(rows))):
            self.originals.add_all(looks)

    def _append_rows(self, images: BinaryIO) -> None:
        progress, total, first = Progress(), len(self.entries), self.done.next
        fresh, marked = _Done(self.done.next, self.done.digest), time.monotonic()
        openers = self.listing.openers(self.entries[first:])
        for rows, looks in in_parallel(partial(_decode_all, settings=self.settings), openers):
            repeated = iter(self.originals.add(looks) if looks else ())
            for row in rows:
                number, fresh.next = fresh.next, fresh.next + 1
                if isinstance(row, str):
                    fresh.unreadable.append((number, row))
                elif (original := next(repeated, None)) is not None:
                    fresh.repeats.append((number, original))
                else:
                    images.write(row.pixels)
                    fresh.kept.append(number)
                    fresh.aspect.append(row.aspect)
                    fresh.digest = hashlib.blake2b(bytes.fromhex(fresh.digest) + row.digest, digest_size=16).hexdigest()
            if time.monotonic() - marked >= MARK_SECONDS or fresh.next == total:
                self._mark(images, fresh)
                fresh, marked = _Done(fresh.next, fresh.digest), time.monotonic()
            left = duration(progress.remaining(fresh.next - first, total - first))
            progress.update(f"packing {fresh.next:,} of {total:,} images, {left} left")
        progress.clear()

    def _mark(self, images: BinaryIO, fresh: _Done) -> None:
        """Rows first, then the line that vouches for them: in this order on the disk."""
        images.flush()
        os.fsync(images.fileno())
        with self.journal.open("a") as journal:
            journal.write(json.dumps(asdict(fresh)) + "\n")
            journal.flush()
            os.fsync(journal.fileno())
        self.done.extend(fresh)

    def _finish(self) -> dict[str, Any]:
        done, names = self.done, [printable(entry.name) for entry in self.entries]
        skipped = [(number, reason) for number, reason in done.unreadable]
        skipped += [(number, f"repeats {names[done.kept[row]]}") for number, row in done.repeats]
        if skipped:
            lines = "".join(f"{names[number]}\t{reason}\n" for number, reason in sorted(skipped))
            write_atomically(self.folder / "skipped.txt", lines.encode("utf-8", "backslashreplace"))
        facts = {
            "size": self.settings.size,
            "kept": done.kept,
            "aspect": done.aspect,
            "pixels": done.digest,
            "unreadable": len(done.unreadable),
            "repeats": len(done.repeats),
        }
        write_atomically(self.folder / "pack.json", json.dumps(facts).encode())
        self.journal.unlink()
        return facts
