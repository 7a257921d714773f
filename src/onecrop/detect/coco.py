"""COCO: annotations/instances_<part>.json beside a folder <part> of pictures; outlines as polygons or run lengths."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onecrop.detect.sets import Collector, DetectionSet, Object
from onecrop.errors import UserError, from_extra


def coco_tools() -> Any:
    """faster-coco-eval: run lengths and the COCO score."""
    return from_extra("faster_coco_eval", "detection", "masks and the COCO score need faster-coco-eval")


def load_coco(folder: Path, part: str, masks: bool, skip_broken: bool = False) -> DetectionSet:
    """One part (train2017, val2017, …). Crowds are not trained on and count neither way in the score, as COCO has it.

    masks: objects without an outline are then skipped and counted.
    """
    file = folder / "annotations" / f"instances_{part}.json"
    content = _read(file)
    try:
        categories = sorted((int(row["id"]), str(row["name"])) for row in content["categories"])
        collector = Collector(f"COCO {part}", categories, skip_broken)
        of_image = defaultdict(list)
        for row in content["annotations"]:
            of_image[int(row["image_id"])].append(row)
        images = [
            (int(row["id"]), int(row["width"]), int(row["height"]), str(row["file_name"])) for row in content["images"]
        ]
        for row_id, width, height, name in images:
            objects = list(_objects(of_image.pop(row_id, []), name, collector))
            if masks:
                objects = [item for item in objects if _has_outline(item, name, width, height, collector)]
            collector.add(folder / part / name, row_id, width, height, objects)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} is not a COCO annotation file ({type(error).__name__}: {error})") from None
    if len({row_id for row_id, *_ in images}) < len(images):
        raise UserError(f"{file} gives two pictures the same id")
    for orphan in of_image:
        collector.refuse(f"{file} has objects of a picture {orphan} that it does not list", "annotations")
    return collector.finish()


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except OSError:
        there = sorted(path.stem.removeprefix("instances_") for path in file.parent.glob("instances_*.json"))
        hint = (
            f"there are {', '.join(there)}: choose with --train-part and --test-part"
            if there
            else "--data is the folder that holds annotations/ and the pictures' folders"
        )
        raise UserError(f"{file} cannot be read; {hint}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a COCO annotation file: it holds no dictionary")
    return content


def _objects(rows: list[dict[str, Any]], picture: str, collector: Collector) -> Iterator[Object]:
    """Those that can be read; of others it is said which."""
    for row in rows:
        try:
            yield _object(row)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"the object {row.get('id')} of {picture} in {collector.name}"
            collector.refuse(f"{what} cannot be read ({type(error).__name__}: {error})", "objects")


def _object(row: dict[str, Any]) -> Object:
    left, top, width, height = (float(value) for value in row["bbox"])
    crowd = bool(int(row.get("iscrowd") or 0))
    box = (left, top, left + width, top + height)
    area = None if row.get("area") is None else float(row["area"])
    return Object(int(row["category_id"]), box, crowd, not crowd, _outline(row.get("segmentation")), area)


def _outline(segmentation: Any) -> Any:
    """Run lengths as they are; of polygons those with three corners or more; None where nothing is left."""
    if isinstance(segmentation, dict):
        return segmentation if {"size", "counts"} <= segmentation.keys() else None
    if not isinstance(segmentation, list):
        return None
    parts = [part for part in segmentation if isinstance(part, list) and len(part) >= 6 and len(part) % 2 == 0]
    return [[float(value) for value in part] for part in parts] or None


def _has_outline(item: Object, picture: str, width: int, height: int, collector: Collector) -> bool:
    """Whether the object's mask can be drawn; where it cannot, that is counted or said."""
    if item.outline is None:
        collector.notes["objects without an outline skipped"] += 1
        return False
    if _fits(item.outline, width, height):
        return True
    fault = f"an object whose outline cannot be drawn in its {width}×{height} pixels"
    collector.refuse(f"{picture} in {collector.name} has {fault}", "objects")
    return False


def _fits(outline: Any, width: int, height: int) -> bool:
    if isinstance(outline, list):  # a corner far away takes the memory of all points on the way to it
        far = np.array([width, height])
        corners = np.concatenate(outline).reshape(-1, 2)
        return bool(((-far <= corners) & (corners <= 2 * far)).all())
    try:
        draw_outlines((outline,), height, width)
    except (TypeError, ValueError, RuntimeError, MemoryError):  # runs that are none, or of another picture
        return False
    return True


def draw_outlines(outlines: tuple[Any, ...], height: int, width: int) -> NDArray[np.uint8]:
    """-> [n, height, width] of 0 and 1."""
    tools = coco_tools().mask
    drawn = np.zeros((len(outlines), height, width), np.uint8)
    for place, outline in enumerate(outlines):
        if isinstance(outline, list):
            runs = tools.merge(tools.frPyObjects(outline, height, width))
        else:
            packed = isinstance(outline["counts"], str | bytes)
            runs = outline if packed else tools.frPyObjects(outline, height, width)
        drawn[place] = tools.decode(runs)
    return drawn


def run_lengths(mask: NDArray[np.uint8]) -> dict[str, Any]:
    """[height, width] of 0 and 1 -> COCO's compressed run lengths, ready for JSON."""
    runs = coco_tools().mask.encode(np.asfortranarray(mask))
    counts = runs["counts"]
    return {"size": list(mask.shape), "counts": counts.decode() if isinstance(counts, bytes) else counts}
