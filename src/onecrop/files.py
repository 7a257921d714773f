"""Files that are either whole or not there."""

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from onecrop.errors import UserError

LOCK_SECONDS = 0.2  # between two looks at a lock that another process holds


@contextlib.contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """A temporary path to write to; on success it is flushed to disk and becomes `path`, else it is removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # some writers replace the file by one that its owner alone may read
        with temporary.open("r+b") as file:  # Windows flushes only what may be written
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; what was there before is untouched") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_atomically(path: Path, content: bytes) -> None:
    with atomically(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is none that can be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def sha256_of(path: Path) -> str:
    """As sha256sum prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append_json_line(path: Path, row: dict[str, Any]) -> None:
    """On a line of its own, even where a crash or a full disk has cut the last one short."""
    try:
        with path.open("a+b") as file:
            file.seek(max(0, file.tell() - 1))
            torn = file.read() not in (b"", b"\n")
            file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line; one cut short by a crash is not."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """One process at a time; the others call `waiting`, which may refuse, and wait. The lock goes with the process,
    however it ends. The file is opened for writing: over a network nothing else can be locked."""
    with path.open("a") as file:
        if not _try_lock(file.fileno()):
            waiting()
            while not _try_lock(file.fileno()):
                time.sleep(LOCK_SECONDS)
        yield


def _try_lock(file: int) -> bool:
    """False while another process has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # as the one and the other system say it
        return False
    except OSError:  # a file system that knows no locks
        pass
    return True


def printable(name: str) -> str:
    """A file name on one line of text: control characters, backslashes and bytes that are no text are escaped."""
    return "".join(c if c.isprintable() and c != "\\" else _escaped(c) for c in name)


def _escaped(character: str) -> str:
    byte = ord(character) - 0xDC00  # os.fsdecode carries a byte that is no text in this range
    return f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else character.encode("unicode_escape").decode()
