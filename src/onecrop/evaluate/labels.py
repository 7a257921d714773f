"""Labels from a CSV file: `file,label` in its first line, files as paths from the CSV's own folder."""

import csv
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from onecrop.data import load
from onecrop.data.sources import Labelled, Request, hold_out, load_labelled
from onecrop.errors import UserError


def load_with_labels(data: str, request: Request) -> Labelled:
    """A named set, class folders, or a CSV file."""
    return _from_csv(Path(data), request) if data.lower().endswith(".csv") else load_labelled(data, request)


def _from_csv(path: Path, request: Request) -> Labelled:
    """The folder that holds all listed images is packed as it is; those with a label are taken from it."""
    label_of = _read(path)
    missing = [file for file in label_of if not os.path.isfile(file)]
    if missing:
        raise UserError(
            f"{path} lists what is not there: {_some(missing)}; paths are taken from the folder of the CSV file"
        )
    root = os.path.commonpath([os.path.dirname(file) for file in label_of])
    images = load(root, "all", request)
    place = {os.path.abspath(file): i for i, file in enumerate(images.files)}
    unread = [file for file in label_of if file not in place]
    if unread:
        print(f"{path}: left out, since it cannot be used as an image: {_some(unread)}")
    used = {place[file]: label for file, label in label_of.items() if file in place}
    index = np.array(sorted(used), np.int64)
    classes = tuple(sorted(set(used.values())))
    if len(classes) < 2:
        raise UserError(f"{path} has {len(classes)} label on images that can be read, and two are needed to tell apart")
    number = {label: i for i, label in enumerate(classes)}
    labels = np.array([number[used[i]] for i in index], np.int64)
    return hold_out(replace(images.take(index), name=str(path), labels=labels, classes=classes))


def _some(files: list[str]) -> str:
    return files[0] + (f" and {len(files) - 1:,} more" if len(files) > 1 else "")


def _read(path: Path) -> dict[str, str]:
    """Absolute path -> label."""
    label_of: dict[str, str] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            rows = csv.DictReader(file)
            if not {"file", "label"} <= set(rows.fieldnames or ()):
                found = ",".join(rows.fieldnames or ())
                raise UserError(
                    f"the first line of {path} has to name two columns, file and label, with a comma between them; "
                    f"it reads {found!r}"
                )
            for row in rows:
                name, label = row["file"], row["label"]
                if not name or not label:
                    raise UserError(f"{path}, line {rows.line_num}: a file and a label are needed")
                where = os.path.abspath(path.parent / name)
                if label_of.setdefault(where, label) != label:
                    raise UserError(f"{path}, line {rows.line_num}: {name} has two labels")
    except (OSError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not label_of:
        raise UserError(f"{path} holds no labels")
    return label_of
