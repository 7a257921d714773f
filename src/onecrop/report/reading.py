"""A run folder as plain data for the page: nothing is computed here, and what is missing is said."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onecrop.errors import UserError
from onecrop.files import read_json, read_json_lines

MAP, MAP_FACTS, MAP_POINTS, MAP_SHEET = "map", "map.json", "points.npz", "thumbnails.webp"

Row = dict[str, Any]


@dataclass(frozen=True)
class PictureMap:
    """Pictures that a backbone has placed; a row of each array a picture."""

    facts: Row
    places: NDArray[np.float32]  # [N, 2]
    neighbours: NDArray[np.int32]  # [N, K], the nearest first
    cosines: NDArray[np.float32]  # [N, K]
    labels: NDArray[np.int64]  # [N], -1 where there are none
    aspect: NDArray[np.float32]  # [N], width / height: the sheet holds squares
    files: tuple[str, ...]  # N, or none
    repeats: NDArray[np.int32]  # [pairs, 2], a picture and the earlier one it looks like
    repeat_cosines: NDArray[np.float32]  # [pairs]
    sheet: bytes  # WebP

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True)
class RunFolder:
    folder: Path
    recipe: Row  # fields and the method's settings side by side
    provenance: Row
    metrics: list[Row]
    results: list[Row]
    shares: list[Row]  # fine-tuning with few labels
    finished: bool
    map: PictureMap | None
    notes: tuple[str, ...]  # what is missing

    @property
    def probes(self) -> list[Row]:
        """Scores on the way, by epoch."""
        return [row for row in self.results if row.get("of") == "pretrained" and "step" in row and "accuracy" in row]

    @property
    def seconds(self) -> float:
        return float(sum(row.get("seconds", 0) for row in self.metrics))


def read_run(folder: Path) -> RunFolder:
    recipe = read_json(folder / "recipe.json")
    if recipe is None:
        raise UserError(f"{folder} is not a run folder: it has no recipe.json that can be read")
    settings = recipe.pop("settings", None)
    notes = []
    provenance = read_json(folder / "provenance.json")
    if provenance is None:
        notes.append("provenance.json is missing or cannot be read")
    metrics = read_json_lines(folder / "metrics.jsonl")
    finished = (folder / "backbone.safetensors").exists() or (folder / "detections.json").exists()
    if not finished:
        done = f"{metrics[-1]['epoch']} of {recipe.get('epochs')} epochs" if metrics and "epoch" in metrics[-1] else ""
        notes.append(f"not finished{f' ({done})' if done else ''}: no backbone yet, and so no map and no neighbours")
    found = _read_map(folder / MAP) if finished else None
    if finished and found is None and (folder / "backbone.safetensors").exists():
        notes.append("no map of pictures: `onecrop report` makes one where the run's images can be read")
    return RunFolder(
        folder,
        recipe | (settings if isinstance(settings, dict) else {}),
        provenance or {},
        metrics,
        read_json_lines(folder / "results.jsonl"),
        read_json_lines(folder / "finetune.jsonl"),
        finished,
        found,
        tuple(notes),
    )


def _read_map(folder: Path) -> PictureMap | None:
    facts = read_json(folder / MAP_FACTS)
    if facts is None:
        return None
    try:
        with np.load(folder / MAP_POINTS) as arrays:
            loaded = {name: arrays[name] for name in arrays.files}
        files = tuple(map(str, loaded.pop("files")))
        return PictureMap(facts, files=files, sheet=(folder / MAP_SHEET).read_bytes(), **loaded)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def name_runs(runs: list[RunFolder]) -> list[str]:
    """As short as tells them apart: the last parts of their paths."""
    paths = [run.folder.resolve().parts for run in runs]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    raise UserError("the same run is named twice: name each one once")
