"""From a trained detector and pictures to detections in COCO's result format."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torchvision.models.detection.roi_heads import paste_masks_in_image

from onecrop.detect.batches import READERS, Sample, Sizes, read_sample
from onecrop.detect.coco import run_lengths
from onecrop.detect.model import Detector
from onecrop.detect.sets import DetectionSet, Picture
from onecrop.progress import Progress, duration

AHEAD = 2 * READERS  # pictures read before they are asked for


@torch.no_grad()
def detect_all(
    model: Detector, pictures: DetectionSet, sizes: Sizes, device: torch.device, interrupted: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """At most 100 detections a picture, one picture at a time, in the pixels of the files; fewer where interrupted."""
    model.eval()
    progress, rows = Progress(), list[dict[str, Any]]()
    with ThreadPoolExecutor(READERS, thread_name_prefix="onecrop-pictures") as pool:
        waiting: list[Future[Sample]] = []
        queue = iter(pictures.pictures)
        for done, picture in enumerate(pictures.pictures, 1):
            if interrupted:
                break
            while len(waiting) < AHEAD and (ahead := next(queue, None)) is not None:
                waiting.append(pool.submit(read_sample, ahead, sizes.test, sizes.longest, False, False))
            sample = waiting.pop(0).result().to(device)
            rows += _rows(picture, sample, model([sample])[0], pictures.categories)
            left = duration(progress.remaining(done, len(pictures)))
            progress.update(f"testing: picture {done:,} of {len(pictures):,}  {left} left", final=done == len(pictures))
    return rows


def _rows(
    picture: Picture, sample: Sample, found: dict[str, torch.Tensor], categories: tuple[tuple[int, str], ...]
) -> list[dict[str, Any]]:
    boxes = (found["boxes"] / sample.ratio).cpu()
    masks = found["masks"].cpu() if "masks" in found else None
    rows = []
    for place, (score, label) in enumerate(zip(found["scores"].tolist(), found["labels"].tolist(), strict=True)):
        left, top, right, bottom = boxes[place].tolist()
        row: dict[str, Any] = {
            "image_id": picture.id,
            "category_id": categories[label - 1][0],
            "bbox": [round(value, 3) for value in (left, top, right - left, bottom - top)],
            "score": round(score, 6),
        }
        if masks is not None:  # one at a time: a hundred of the picture's size take three times as long
            only = slice(place, place + 1)
            drawn = paste_masks_in_image(masks[only], boxes[only], (picture.height, picture.width))[0, 0] >= 0.5
            row["segmentation"] = run_lengths(drawn.numpy().astype(np.uint8))
        rows.append(row)
    return rows
