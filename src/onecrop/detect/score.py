"""The score of a file of detections against a file of truth, both in COCO's format: no network, no GPU, no pictures.

COCO's AP is faster-coco-eval's: the mean over ten overlaps and 101 recalls, at most 100 detections a picture. VOC07's
is written out here: at every overlap the mean over eleven recalls, which is how detectron2 computes AP, AP50 and AP75
on VOC for MoCo's tables. Objects that VOC calls difficult, and COCO's crowds, count neither as found nor as missed.
"""

import json
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onecrop.detect.coco import coco_tools
from onecrop.detect.recipe import DetectRecipe, Metric
from onecrop.detect.run import DetectRun
from onecrop.errors import UserError

OVERLAPS = np.linspace(0.5, 0.95, 10)
Scores = dict[str, float]  # AP, AP50 and AP75 in percent


def score_run(folder: Path | str, metric: Metric | None = None) -> list[dict[str, Any]]:
    """Score a run's detections from its files; a row for boxes and, where it has them, one for masks -> the rows."""
    run = DetectRun(folder)
    recipe: DetectRecipe = run.recipe()
    if not run.finished:
        raise UserError(f"{run.folder} has no detections yet: continue it with --resume")
    truth, detections = _read(run.truth_file), _read(run.detections_file)
    metric = metric or recipe.metric or "coco"
    kinds = ["boxes", "masks"] if recipe.masks and metric == "coco" else ["boxes"]
    rows = []
    for kind in kinds:
        scores = voc07_scores(truth, detections) if metric == "voc07" else coco_scores(truth, detections, kind)
        row = {"evaluation": f"detection {kind}", "metric": metric, **scores, **run.facts(recipe)}
        rows.append(row | {"date": datetime.now(UTC).isoformat(timespec="seconds")})
        run.add_result(rows[-1])
        run.say(f"{kind}, {metric}: " + ", ".join(f"{name} {value:.2f}" for name, value in scores.items()))
    return rows


def coco_scores(truth: dict[str, Any], detections: list[dict[str, Any]], kind: str = "boxes") -> Scores:
    """AP, AP50, AP75 of boxes or masks in percent, by faster-coco-eval."""
    tools = coco_tools()
    rows = [dict(row) for row in detections]
    if kind == "masks":
        rows = [{name: row[name] for name in row if name != "bbox"} for row in rows]  # its area would be the box's
    known = tools.COCO(json.loads(json.dumps(truth)))  # a copy: the scorer writes into it
    evaluation = tools.COCOeval_faster(known, known.loadRes(rows), "segm" if kind == "masks" else "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    ap, ap50, ap75 = (100 * max(0.0, float(value)) for value in evaluation.stats[:3])
    return {"AP": ap, "AP50": ap50, "AP75": ap75}


def voc07_scores(truth: dict[str, Any], detections: list[dict[str, Any]]) -> Scores:
    """The 11-point average precision, in percent, as a mean over the categories that have objects."""
    objects, found = _by_category(truth["annotations"]), _by_category(detections)
    means = []
    for category, rows in objects.items():
        if not all(row["iscrowd"] for row in rows):
            means.append([eleven_points(rows, found.get(category, []), overlap) for overlap in OVERLAPS])
    if not means:
        raise UserError("there is no object to find in the pictures to test on")
    at = 100 * np.mean(means, axis=0)
    return {"AP": float(at.mean()), "AP50": float(at[0]), "AP75": float(at[5])}


def eleven_points(objects: list[dict[str, Any]], found: list[dict[str, Any]], overlap: float) -> float:
    """Average precision of one category: the mean, over recalls 0, .1, … 1, of the best precision at that or more.

    Detections are gone through from the surest. Each looks for the object it covers best; if that one is covered enough
    and new, it is a hit; if it is difficult, nothing is counted; else it is a miss.
    """
    of_picture = defaultdict(list)
    for row in objects:
        of_picture[row["image_id"]].append(row)
    boxes = {picture: _corners(rows) for picture, rows in of_picture.items()}
    taken = {picture: np.zeros(len(rows), bool) for picture, rows in of_picture.items()}
    hits = []
    for row in sorted(found, key=lambda row: -row["score"]):
        picture = row["image_id"]
        cover = overlaps(_corners([row])[0], boxes[picture]) if picture in boxes else np.zeros(0)
        best = int(cover.argmax()) if len(cover) else -1
        enough = best >= 0 and cover[best] >= overlap
        if enough and of_picture[picture][best]["iscrowd"]:
            continue
        hit = enough and not taken[picture][best]
        if hit:
            taken[picture][best] = True
        hits.append(hit)
    total = sum(not row["iscrowd"] for row in objects)
    found_so_far = np.cumsum(hits)
    recall, precision = found_so_far / total, found_so_far / np.arange(1, len(hits) + 1)
    best_from = [precision[recall >= wanted - 1e-12].max(initial=0.0) for wanted in np.linspace(0, 1, 11)]
    return float(np.mean(best_from))


def overlaps(box: NDArray[np.float64], boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Intersection over union of one box with several [n, 4]."""
    sides = np.clip(np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2]), 0, None)
    common = sides.prod(axis=1)
    whole = (box[2:] - box[:2]).prod() + (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) - common
    return common / np.maximum(whole, 1e-12)


def _corners(rows: list[dict[str, Any]]) -> NDArray[np.float64]:
    boxes = np.array([row["bbox"] for row in rows], np.float64)
    return np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)


def _by_category(rows: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    groups = defaultdict(list)
    for row in rows:
        groups[row["category_id"]].append(row)
    return groups


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
