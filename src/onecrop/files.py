"""Files that are either whole or not there."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onecrop.errors import UserError


@contextlib.contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """A temporary path to write to; on success it is flushed to disk and becomes `path`, else it is removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb") as file:
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


def append_json_line(path: Path, row: dict[str, Any]) -> None:
    try:
        with path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line; a last line cut short by a crash is not one."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text("utf-8", "replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows
