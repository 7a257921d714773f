"""CIFAR-10 and CIFAR-100 in their two official layouts, binary and python. Nothing in a file is executed."""

import io
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onecrop.data.images import ImageSet
from onecrop.errors import UserError

PIXELS = 3 * 32 * 32


class Layout(NamedTuple):
    binary: str  # folder of the binary layout
    python: str  # folder of the python layout
    train: tuple[str, ...]  # files, without the ending .bin of the binary layout
    test: tuple[str, ...]
    label_bytes: int  # before each record of the binary layout; the last one counts
    label_key: bytes
    names: str
    names_key: bytes


LAYOUTS = {
    "cifar10": Layout(
        "cifar-10-batches-bin",
        "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        ("test_batch",),
        1,
        b"labels",
        "batches.meta",
        b"label_names",
    ),
    "cifar100": Layout(
        "cifar-100-binary", "cifar-100-python", ("train",), ("test",), 2, b"fine_labels", "meta", b"fine_label_names"
    ),
}


def cifar(name: str, split: str, data_dir: Path) -> ImageSet:
    layout = LAYOUTS[name]
    parts = layout.train if split == "train" else layout.test
    binary, python = data_dir / layout.binary, data_dir / layout.python
    if not binary.is_dir() and not python.is_dir():
        _download(name, data_dir)
    folder, read = (binary, _read_binary) if binary.is_dir() else (python, _read_python)
    images, labels = zip(*(read(folder / part, layout) for part in parts), strict=True)
    pixels, numbers = np.concatenate(images).reshape(-1, 3, 32, 32), np.concatenate(labels).astype(np.int64)
    classes = _class_names(folder, layout) or tuple(map(str, range(10 if name == "cifar10" else 100)))
    wrong = numbers[(numbers < 0) | (numbers >= len(classes))]
    if wrong.size:
        raise UserError(f"{folder} holds the label {wrong[0]}, but there are {len(classes)} classes: fetch it again")
    return ImageSet(name, pixels, numbers, classes, image_size=32)


def _read_binary(path: Path, layout: Layout) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    path = path.with_name(path.name + ".bin")
    records = np.frombuffer(_bytes(path), np.uint8)
    if records.size == 0 or records.size % (layout.label_bytes + PIXELS):
        raise UserError(f"{path} has {records.size} bytes, not a whole number of CIFAR records: fetch it again")
    records = records.reshape(-1, layout.label_bytes + PIXELS)
    return records[:, layout.label_bytes :], records[:, layout.label_bytes - 1]


def _read_python(path: Path, layout: Layout) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    content = load_arrays(path)
    try:
        pixels, labels = np.asarray(content[b"data"], np.uint8), np.asarray(content[layout.label_key], np.int64)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{path} is not a CIFAR batch: it has no {layout.label_key.decode()} and data") from None
    if not labels.size or pixels.shape != (labels.size, PIXELS):
        raise UserError(f"{path} is not a CIFAR batch: data has shape {pixels.shape} for {labels.size} labels")
    return pixels, labels.reshape(-1)


class _ArraysOnly(pickle.Unpickler):
    """Admits what CIFAR's files are made of, numpy arrays in dicts, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how python 3 writes the bytes of an array in protocol 2
            return lambda text, encoding: text.encode("latin1")
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file contains")


def load_arrays(path: Path) -> dict[Any, Any]:
    try:
        content = _ArraysOnly(io.BytesIO(_bytes(path)), encoding="bytes").load()
    except Exception as error:  # a damaged pickle fails in many ways
        raise UserError(f"{path} cannot be read ({error}): fetch it again") from None
    return content if isinstance(content, dict) else {}


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _class_names(folder: Path, layout: Layout) -> tuple[str, ...]:
    for text in (folder / "batches.meta.txt", folder / "fine_label_names.txt"):
        if text.exists():
            return tuple(_bytes(text).decode(errors="replace").split())
    names = load_arrays(folder / layout.names).get(layout.names_key) if (folder / layout.names).exists() else None
    if not isinstance(names, list):
        return ()
    return tuple(name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in names)


def _download(name: str, data_dir: Path) -> None:
    from torchvision.datasets import CIFAR10, CIFAR100
    from torchvision.datasets.utils import download_and_extract_archive

    source, layout = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name], LAYOUTS[name]
    try:
        download_and_extract_archive(source.url, str(data_dir), filename=source.filename, md5=source.tgz_md5)
    except Exception as error:
        raise UserError(
            f"{name} is not in {data_dir} and cannot be downloaded ({error}): "
            f"put the folder {layout.binary} or {layout.python} there, or name another --data-dir"
        ) from None
