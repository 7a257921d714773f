"""What a backbone sees, as data for a page: a flat map of pictures, their nearest neighbours and their thumbnails.

A map lies in its run folder, in map/: points.npz (places, neighbours, labels), thumbnails.webp (all pictures on one
sheet, as squares) and map.json (how it was made), which is written last: a map that has it is whole.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from onecrop.data import SOURCES, ImageSet, load
from onecrop.data.duplicates import Originals, look_at
from onecrop.data.images import subset_index
from onecrop.data.sources import Request, has_test_part
from onecrop.embed import features_of
from onecrop.errors import UserError, from_extra, unknown
from onecrop.files import atomically, read_json, sha256_of, write_json
from onecrop.nets import read_backbone
from onecrop.report.page import write_page
from onecrop.report.reading import MAP, MAP_FACTS, MAP_POINTS, MAP_SHEET, name_runs, read_run
from onecrop.runs import Run

POINTS = 5000  # as in the paper's appendix
NEIGHBOURS = 12
PERPLEXITY = 30.0
FEWEST = 5  # points that make a map
SHEET_PIXELS = 12_000_000  # of all thumbnails: a few megabytes of WebP
TILE = (24, 96)  # px a side of a thumbnail at least and at most
BLOCK = 500  # pictures compared with all others at a time


def report(
    runs: Sequence[Path | str],
    out: Path | str | None = None,
    *,
    data: str | None = None,
    data_dir: str | None = None,
    points: int = POINTS,
    seed: int = 0,
    device: str = "auto",
) -> Path:
    """One page about one or several runs. Maps are made where a run has none yet; points = 0 leaves them out.

    A run whose map cannot be made has its curves and tables all the same, and a sentence that says what is missing.
    """
    folders = [Path(run) for run in runs]
    if points and points < FEWEST:
        raise UserError(f"--points {points} is too few for a map: at least {FEWEST}, or 0 for a page without one")
    if data is not None and data not in SOURCES and not Path(data).exists():
        raise unknown("data set (and no such folder)", data, SOURCES)
    name_runs([read_run(folder) for folder in folders])  # all of them can be read, before the work
    for folder in folders if points else ():
        try:
            make_map(folder, data, data_dir=data_dir, points=points, seed=seed, device=device)
        except (UserError, OSError) as error:
            print(f"onecrop: no map of {folder}: {error}", file=sys.stderr)
    path = Path(out) if out is not None else folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    return write_page(folders, path)


def make_map(
    run: Path | str,
    data: str | None = None,
    *,
    data_dir: str | None = None,
    points: int = POINTS,
    seed: int = 0,
    device: str = "auto",
) -> Path:
    """Draw at most so many pictures, place them by t-SNE and find their neighbours -> the map's folder.

    The pictures are those of the test part where the data has one, else all. A map made before in the same way stays.
    """
    begun = Run(run)
    folder = begun.folder
    if not begun.finished:
        raise UserError(f"{folder} has no backbone, being unfinished or a detection run")
    _, about = read_backbone(folder)
    recipe = begun.recipe()
    name = data or str(about["data"])
    part = "test" if (recipe.holdout and data is None) or has_test_part(name) else "train"
    asked = {
        "data": name,
        "part": part,
        "points": points,
        "seed": seed,
        "backbone": sha256_of(begun.backbone_file),
    }
    if (read_json(folder / MAP / MAP_FACTS) or {}).get("asked") == asked:
        return folder / MAP
    tsne_class()  # missing packages are said before the work
    request = Request(
        recipe.data_dir if data_dir is None else data_dir,
        int(about["image_size"]),
        holdout=recipe.holdout if data is None else 0,
        drop_duplicates=data is None and recipe.drop_duplicates,
    )
    images = load(name, part, request)
    if len(images) < FEWEST:
        raise UserError(f"{name} has {len(images)} images, and a map takes at least {FEWEST}")
    images = images.take(subset_index(len(images), min(points, len(images)), seed))
    _write(folder / MAP, images, features_of(folder, images, int(about["image_size"]), device), asked)
    return folder / MAP


def _write(folder: Path, images: ImageSet, features: NDArray[np.float32], asked: dict[str, Any]) -> None:
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    started = time.monotonic()
    places = place(unit, asked["seed"])
    seconds = time.monotonic() - started
    near, cosines = nearest(unit, NEIGHBOURS)
    repeats = find_repeats(images)
    sheet, tile = draw_sheet(images)
    (folder / MAP_FACTS).unlink(missing_ok=True)  # from here until it is written again the map is not whole
    with atomically(folder / MAP_SHEET) as temporary:
        sheet.save(temporary, "WEBP", quality=75, method=4)
    with atomically(folder / MAP_POINTS) as temporary, temporary.open("wb") as file:
        np.savez_compressed(
            file,
            places=places,
            neighbours=near,
            cosines=cosines,
            labels=np.full(len(images), -1) if images.labels is None else images.labels,
            aspect=images.true_aspect,
            files=np.array(images.files, str),
            repeats=repeats,
            repeat_cosines=(unit[repeats[:, 0]] * unit[repeats[:, 1]]).sum(1),
        )
    facts = {
        "asked": asked,
        "fingerprint": images.fingerprint,  # maps with the same one show the same pictures, in the same order
        "images": len(images),
        "dim": features.shape[1],
        "classes": list(images.classes) if images.labels is not None else [],
        "tile": tile,
        "columns": sheet.width // tile,
        "method": f"t-SNE of unit features, perplexity {_perplexity(len(images)):g}, started from their main axes",
        "seconds": seconds,
    }
    write_json(folder / MAP_FACTS, facts)


def place(unit: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """[N, 2] by t-SNE, a function of the features and the seed."""
    tsne = tsne_class()
    start = main_axes(unit)
    start *= 1e-4 / max(float(start[:, 0].std()), 1e-12)  # t-SNE wants to begin small
    made = tsne(2, perplexity=_perplexity(len(unit)), init=start, random_state=seed % 2**32, n_jobs=-1)
    return np.asarray(made.fit_transform(unit), np.float32)


def main_axes(unit: NDArray[np.float32]) -> NDArray[np.float32]:
    """[N, 2]: the two directions of largest spread, each with a sign that does not depend on the solver."""
    centred = unit - unit.mean(0)
    _, vectors = np.linalg.eigh(centred.T @ centred)  # ascending
    axes = vectors[:, [-1, -2]] if vectors.shape[1] > 1 else np.repeat(vectors, 2, axis=1)
    axes = axes * np.sign(axes[np.abs(axes).argmax(0), [0, 1]])
    return np.asarray(centred @ axes, np.float32)


def _perplexity(count: int) -> float:
    return min(PERPLEXITY, (count - 1) / 3)


def tsne_class() -> Any:
    return from_extra("sklearn.manifold", "report", "maps need scikit-learn").TSNE


def nearest(unit: NDArray[np.float32], count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """[N, count] rows, the nearest first, itself left out, and their cosines; nothing of size N×N is held."""
    count = min(count, len(unit) - 1)
    rows = np.empty((len(unit), count), np.int32)
    cosines = np.empty((len(unit), count), np.float32)
    for start in range(0, len(unit), BLOCK):
        found = unit[start : start + BLOCK] @ unit.T  # [BLOCK, N]
        own = np.arange(len(found))
        found[own, start + own] = -np.inf
        near = np.sort(np.argpartition(-found, count - 1, axis=1)[:, :count], axis=1)  # by row, then by cosine
        order = np.argsort(-np.take_along_axis(found, near, axis=1), axis=1, kind="stable")
        near = np.take_along_axis(near, order, axis=1)
        rows[start : start + BLOCK], cosines[start : start + BLOCK] = near, np.take_along_axis(found, near, axis=1)
    return rows, cosines


def find_repeats(images: ImageSet) -> NDArray[np.int32]:
    """[pairs, 2]: a picture, and the earlier one it looks like."""
    originals, rows, pairs = Originals(), list[int](), list[tuple[int, int]]()
    for start in range(0, len(images), BLOCK):
        squares = [Image.fromarray(pixels.transpose(1, 2, 0)) for pixels in images.images[start : start + BLOCK]]
        for row, original in enumerate(originals.add(look_at(squares)), start):
            if original is None:
                rows.append(row)
            else:
                pairs.append((row, rows[original]))
    return np.array(pairs, np.int32).reshape(-1, 2)


def draw_sheet(images: ImageSet) -> tuple[Image.Image, int]:
    """Every picture as a square tile, row by row -> the sheet and the side of a tile."""
    count, stored = len(images), images.images.shape[-1]
    tile = int(np.clip((SHEET_PIXELS / count) ** 0.5, *TILE))
    tile = min(tile, max(stored, TILE[0]))
    columns = int(np.ceil(count**0.5))
    sheet = Image.new("RGB", (columns * tile, -(-count // columns) * tile))
    for number in range(count):
        picture = Image.fromarray(images.images[number].transpose(1, 2, 0))
        sheet.paste(picture.resize((tile, tile)), (number % columns * tile, number // columns * tile))
    return sheet, tile
