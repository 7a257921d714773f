"""What lies in a folder: image files by their names, and what was passed over and why. Nothing is opened."""

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from onecrop.data.decode import Opener
from onecrop.errors import UserError

SUFFIXES = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".avif", ".jp2", ".tga"}
SUFFIXES |= {".ppm", ".pgm", ".pbm", ".pnm"}
# Photographs that Pillow does not decode: of phones, and raw ones of cameras.
UNREAD = {".heic", ".heif", ".cr2", ".cr3", ".nef", ".arw", ".dng", ".raf", ".orf", ".rw2"}


class Entry(NamedTuple):
    """An image file, by its name; whether it is one shows when it is decoded."""

    name: str  # path below the root, with "/"; any bytes, as os.fsdecode gives them
    size: int
    time: int  # of its last change


class Skipped(NamedTuple):
    name: str
    reason: str


@dataclass(frozen=True)
class Listing:
    """The images below `root`, a folder or an archive, in the order in which they are read."""

    root: Path
    entries: tuple[Entry, ...]
    skipped: tuple[Skipped, ...]  # folders that cannot be read, links, and the like
    others: tuple[str, ...]  # files whose names are not those of images
    openers: Callable[[Sequence[Entry]], Iterator[Opener]]  # entries in listed order -> how to open each

    def path(self, entry: Entry) -> str:
        return f"{self.root}/{entry.name}"

    def unread(self) -> str:
        """What to do about photographs in formats that are not read; "" where there are none."""
        found = Counter(suffix for name in self.others if (suffix := _suffix(name)) in UNREAD)
        kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in found.most_common())
        return f"{kinds} {'is' if found.total() == 1 else 'are'} not read: convert to .jpg first" if found else ""


def is_image_name(name: str) -> bool:
    return _suffix(name) in SUFFIXES


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def list_folder(root: Path) -> Listing:
    """Everything below `root`, sorted by name. Hidden files are passed over, links not followed: they lead in circles,
    out of the folder, or to a picture that is listed already."""
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    others: list[str] = []
    waiting = [""]
    while waiting:
        below = waiting.pop()
        try:
            with os.scandir(root / below if below else root) as children:
                for child in children:
                    if not child.name.startswith("."):
                        name = below + child.name
                        if child.is_dir(follow_symlinks=False):
                            waiting.append(name + "/")
                        elif not is_image_name(name) and not child.is_symlink():
                            others.append(name)
                        else:
                            _add(child, name, entries, skipped)
        except OSError as error:
            if not below:
                raise UserError(f"cannot read the folder {root}: {error.strerror}") from None
            skipped.append(Skipped(below, f"the folder cannot be read: {error.strerror}"))
    return Listing(root, tuple(sorted(entries)), tuple(sorted(skipped)), tuple(sorted(others)), partial(_openers, root))


def _add(child: "os.DirEntry[str]", name: str, entries: list[Entry], skipped: list[Skipped]) -> None:
    try:
        state = child.stat(follow_symlinks=False)
    except OSError as error:  # gone since the folder was listed
        skipped.append(Skipped(name, error.strerror or "cannot be read"))
        return
    if stat.S_ISREG(state.st_mode):
        entries.append(Entry(name, state.st_size, state.st_mtime_ns))
    else:  # reading a pipe would wait for ever
        skipped.append(Skipped(name, "a link, not followed" if stat.S_ISLNK(state.st_mode) else "not a regular file"))


def _openers(root: Path, entries: Sequence[Entry]) -> Iterator[Opener]:
    return (partial(_open, f"{root}/{entry.name}") for entry in entries)


def _open(path: str) -> BinaryIO:
    return open(path, "rb")
