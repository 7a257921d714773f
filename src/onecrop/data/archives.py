"""Zip and tar archives of images, read in place: nothing is ever written to the disk under a member's name.

A member that would leave its folder, or a size that no collection of images has, refuses the whole archive.
"""

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from onecrop.data.decode import Opener
from onecrop.data.listing import Entry, Listing, Skipped, is_image_name
from onecrop.errors import UserError
from onecrop.progress import readable

MEMBER_LIMIT = 512 * 2**20  # bytes of one image file: it is decoded from memory
FREE_BYTES, RATIO_LIMIT = 2**30, 200  # an archive may grow so much, and beyond that so many times its own size
PIECE = 2**20  # bytes inflated at a time

COMPRESSED_TARS: dict[str, Callable[[Path], Any]] = {
    ".tar.gz": gzip.open,
    ".tgz": gzip.open,
    ".tar.bz2": bz2.open,
    ".tbz2": bz2.open,
    ".tar.xz": lzma.open,
    ".txz": lzma.open,
}
ENDINGS = (".zip", ".tar", *COMPRESSED_TARS)


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(ENDINGS) and path.is_file()


def list_archive(path: Path) -> Listing:
    """The images of an archive, in its own order; of two members with one name the last counts, as when unpacking."""
    with _damage_named(path):
        return _list_zip(path) if path.name.lower().endswith(".zip") else _list_tar(path)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a damaged archive fails in many ways
        raise UserError(f"{path} cannot be read as an archive ({error}): fetch or make it again") from None


class _Members:
    """Sorts the members of an archive into images, others and what is left out, and refuses the archive as a whole."""

    def __init__(self, path: Path) -> None:
        self.path, self.declared = path, 0
        self.limit = FREE_BYTES + RATIO_LIMIT * path.stat().st_size
        self.found: dict[str, tuple[Entry, Any]] = {}  # name -> (entry, where its bytes are)
        self.skipped: list[Skipped] = []
        self.others: list[str] = []

    def add(self, raw_name: str, size: int, time: int, where: Any, why_not: str | None) -> None:
        name = self._checked(raw_name)
        self.declared += size
        if self.declared > self.limit:
            raise too_large(self.path, self.limit)
        if not name or any(part.startswith(".") or part == "__MACOSX" for part in name.split("/")):
            return
        if not is_image_name(name):
            self.others.append(name)
        elif why_not:
            self.skipped.append(Skipped(name, why_not))
        elif size > MEMBER_LIMIT:
            raise UserError(
                f"{self.path} is refused: its member {name!r} declares {readable(size)}, and an image file in an "
                f"archive may have {readable(MEMBER_LIMIT)}"
            )
        else:
            self.found.pop(name, None)  # an earlier member of the name; the last one takes its own place in the order
            self.found[name] = Entry(name, size, time), where

    def _checked(self, name: str) -> str:
        parts = name.replace("\\", "/").split("/")
        if parts[0] == "" or ".." in parts or parts[0][1:2] == ":" or "\0" in name:
            raise UserError(f"{self.path} is refused: its member {name!r} would lie outside of the folder it names")
        return "/".join(part for part in parts if part not in ("", "."))

    def listing(self, opened_in: Callable[[dict[str, Any], Sequence[Entry]], Iterator[Opener]]) -> Listing:
        entries = tuple(entry for entry, _ in self.found.values())
        places = {name: where for name, (_, where) in self.found.items()}
        return Listing(self.path, entries, tuple(self.skipped), tuple(self.others), partial(opened_in, places))


def too_large(path: Path, limit: int) -> UserError:
    return UserError(
        f"{path} is refused: it unpacks to more than {readable(limit)}, which no archive of images of its size does"
    )


def _list_zip(path: Path) -> Listing:
    archive, lock = zipfile.ZipFile(path), threading.Lock()
    members = _Members(path)
    for info in archive.infolist():
        if info.is_dir():
            continue
        why_not = None
        if stat.S_ISLNK(info.external_attr >> 16):
            why_not = "a link, not followed"
        elif info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            why_not = "packed by a method other than deflate"  # the others cannot be inflated piece by piece
        members.add(info.filename, info.file_size, info.CRC, info, why_not)

    def read(info: zipfile.ZipInfo) -> BinaryIO:
        with lock:  # ZipFile counts its readers without one
            member = archive.open(info)
        try:
            # in pieces, and no more than declared: a member that lies about its size costs nothing and fails its CRC
            return io.BytesIO(b"".join(iter(partial(member.read, PIECE), b"")))
        finally:
            with lock:
                member.close()

    return members.listing(lambda places, entries: (partial(read, places[entry.name]) for entry in entries))


def _list_tar(path: Path) -> Listing:
    unpack = next((opened for ending, opened in COMPRESSED_TARS.items() if path.name.lower().endswith(ending)), None)
    members = _Members(path)
    with _tar_stream(path, unpack, members.limit) if unpack else tarfile.open(path, "r:", tarinfo=_Header) as archive:
        for number, info in enumerate(archive):
            if not info.isdir():
                link = info.issym() or info.islnk()
                why_not = "a link, not followed" if link else None if info.isreg() else "not a regular file"
                why_not = "a sparse file" if info.issparse() else why_not
                where = number if unpack else (info.offset_data, info.size)
                members.add(info.name, info.size, int(info.mtime), where, why_not)
    if unpack:
        return members.listing(partial(_streamed, path, unpack, members.limit))
    return members.listing(partial(_in_place, path))


def _in_place(path: Path, places: dict[str, Any], entries: Sequence[Entry]) -> Iterator[Opener]:
    def read(place: tuple[int, int]) -> BinaryIO:
        with path.open("rb") as file:
            file.seek(place[0])
            return io.BytesIO(file.read(place[1]))

    return (partial(read, places[entry.name]) for entry in entries)


def _streamed(
    path: Path, unpack: Callable[[Path], Any], limit: int, places: dict[str, Any], entries: Sequence[Entry]
) -> Iterator[Opener]:
    """A compressed tar has no places to jump to: it is read from its start, as the openers are asked for."""
    wanted = {places[entry.name] for entry in entries}
    with _damage_named(path), _tar_stream(path, unpack, limit) as archive:
        for number, info in enumerate(archive):
            if number in wanted:
                yield partial(io.BytesIO, cast(BinaryIO, archive.extractfile(info)).read())


class _Header(tarfile.TarInfo):
    """Behind the first member tarfile takes a damaged header for the end, and all that follows would be lost unsaid."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf.strip(b"\0"):  # zeros, or nothing at all, are the true end
                raise tarfile.ReadError(str(error)) from None
            raise


class _Counted(io.RawIOBase):
    """A stream that refuses to give more than `limit` bytes, whatever its headers say."""

    def __init__(self, stream: Any, path: Path, limit: int) -> None:
        self.stream, self.path, self.left, self.limit = stream, path, limit, limit

    def read(self, size: int = -1) -> bytes:
        content: bytes = self.stream.read(size)
        self.left -= len(content)
        if self.left < 0:
            raise too_large(self.path, self.limit)
        return content


@contextmanager
def _tar_stream(path: Path, unpack: Callable[[Path], Any], limit: int) -> Iterator[tarfile.TarFile]:
    with unpack(path) as stream:
        counted = _Counted(stream, path, limit)
        with tarfile.open(fileobj=counted, mode="r|", tarinfo=_Header) as archive:
            yield archive
