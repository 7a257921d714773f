"""Use a backbone on pictures: features of a whole folder to a file, and the pictures nearest to one."""

import csv
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from onecrop.data import SOURCES, ImageSet, load
from onecrop.data.decode import decode
from onecrop.data.sources import Request, pretrained_on, stored_size
from onecrop.device import choose_device
from onecrop.errors import UserError, from_extra
from onecrop.evaluate.features import Probe, extract
from onecrop.files import atomically, printable
from onecrop.nets import load_backbone, read_backbone
from onecrop.report.neighbours import draw_neighbours


class Embedded(NamedTuple):
    files: tuple[str, ...]  # the place in its data set, where an image comes from no file
    features: NDArray[np.float32]  # [N, dim]


def embed(
    run: Path | str, data: str, out: Path | str | None = None, *, data_dir: str = "data", device: str = "auto"
) -> Embedded:
    """Features of every readable image of `data`, central crops; `out` is an .npz, .csv or .parquet file."""
    writer = _writer(Path(out)) if out is not None else None  # before the work, not after it
    embedded, _ = _embed(run, data, data_dir, device)
    if writer is not None:
        writer(embedded)
    return embedded


def _embed(run: Path | str, data: str, data_dir: str, device: str) -> tuple[Embedded, ImageSet]:
    _, facts = read_backbone(run)
    images = load(data, "train" if data in SOURCES else "all", Request(data_dir, facts["image_size"]))
    features = features_of(run, images, facts["image_size"], device)
    return Embedded(images.files or tuple(map(str, range(len(images)))), features), images


def features_of(run: Path | str, images: ImageSet, image_size: int, device: str) -> NDArray[np.float32]:
    """[N, dim] of central crops."""
    probe = Probe(image_size, choose_device(device))
    return extract(load_backbone(run).to(probe.device), images, probe).cpu().numpy()


def search(
    run: Path | str,
    image: Path | str,
    data: str | None = None,
    out: Path | str = "search.png",
    *,
    count: int = 10,
    data_dir: str = "data",
    device: str = "auto",
) -> list[tuple[float, str]]:
    """(cosine, file) of the images of `data` nearest to `image`, itself left out; `out` shows them."""
    if count < 1:
        raise UserError(f"--count {count} is too small: ask for at least one neighbour")
    if Path(out).suffix.lower() != ".png":
        raise UserError(f"--out {out} does not fit: neighbours are drawn as a PNG, let it end in .png")
    _, facts = read_backbone(run)
    query = _one(Path(image), facts["image_size"])
    embedded, images = _embed(run, data or pretrained_on(facts), data_dir, device)
    wanted = torch.from_numpy(features_of(run, query, facts["image_size"], device))
    cosines = (F.normalize(torch.from_numpy(embedded.features), dim=1) @ F.normalize(wanted, dim=1)[0]).numpy()
    itself = np.array([_same_file(file, image) for file in embedded.files])
    order = [int(row) for row in np.argsort(-cosines, kind="stable") if not itself[row]][:count]
    found = [(float(cosines[row]), embedded.files[row]) for row in order]
    aspects = [float(query.true_aspect[0]), *(float(images.true_aspect[row]) for row in order)]
    pictures = [pixels.transpose(1, 2, 0) for pixels in (*query.images[:], *images.images[order])]
    captions = [Path(image).name, *(f"{Path(file).name}  {cosine:.3f}" for cosine, file in found)]
    draw_neighbours(pictures, aspects, captions, Path(out))
    return found


def _one(path: Path, image_size: int) -> ImageSet:
    with warnings.catch_warnings():  # decoders warn of metadata and of many pixels, as in a folder
        warnings.simplefilter("ignore")
        picture = decode(lambda: path.open("rb"), stored_size(image_size))
    if isinstance(picture, str):
        raise UserError(f"cannot read the image {printable(str(path))}: {picture}")
    pixels = np.asarray(picture.square).transpose(2, 0, 1)[None].copy()
    return ImageSet(str(path), pixels, aspect=np.array([picture.width / picture.height], np.float32))


def _same_file(file: str, other: Path | str) -> bool:
    return Path(file).name == Path(other).name and Path(file).resolve() == Path(other).resolve()


def _writer(path: Path) -> Callable[[Embedded], None]:
    writers = {".npz": _write_npz, ".csv": _write_csv, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise UserError(f"{path} is no file for features: let its name end in {', '.join(writers)}")
    if path.suffix == ".parquet":
        _pyarrow()
    return partial(writers[path.suffix], path)


def _write_npz(path: Path, embedded: Embedded) -> None:
    """Arrays `files` and `features`; numpy.load needs no pickle for them."""
    with atomically(path) as temporary, temporary.open("wb") as file:
        np.savez(file, files=np.array(embedded.files), features=embedded.features)


def _write_csv(path: Path, embedded: Embedded) -> None:
    """A line an image: its file, then its features."""
    with (
        atomically(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        rows = csv.writer(file)
        rows.writerow(["file", *range(embedded.features.shape[1])])
        for name, features in zip(embedded.files, embedded.features, strict=True):
            rows.writerow([name, *(f"{value:.7g}" for value in features)])


def _write_parquet(path: Path, embedded: Embedded) -> None:
    """Columns `file` and `features`, a list of fixed length."""
    arrow, parquet = _pyarrow()
    names = [name.encode("utf-8", "backslashreplace").decode() for name in embedded.files]  # Parquet's text is UTF-8
    flat = arrow.array(embedded.features.ravel())
    lists = arrow.FixedSizeListArray.from_arrays(flat, embedded.features.shape[1])
    with atomically(path) as temporary:
        parquet.write_table(arrow.table({"file": names, "features": lists}), temporary)


def _pyarrow() -> tuple[Any, Any]:
    need = "Parquet needs pyarrow, where .npz and .csv need nothing more"
    return from_extra("pyarrow", "parquet", need), from_extra("pyarrow.parquet", "parquet", need)
