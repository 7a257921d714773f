"""Pictures with boxes: what detection trains on and is scored by, with everything odd in the annotations counted.

A box that reaches over the edge of its picture is cut there; one of which nothing is left is skipped; both are counted.
A missing or unreadable picture, a picture of another size than its annotation says and a category that the set does
not have are said before anything is trained, or skipped and counted with --skip-broken.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from onecrop.errors import UserError

SMALLEST_SIDE = 1e-5  # pixels; what is thinner than this after clipping is no box (detectron2's limit)
CLIPPED = "boxes clipped at the picture's edge"


class Object(NamedTuple):
    """One annotated object as its file has it."""

    category: int | str
    box: tuple[float, float, float, float]  # left, top, right, bottom in pixels from the upper left corner
    ignored: bool = False  # scoring counts it neither way: VOC's difficult objects, COCO's crowds
    trained_on: bool = True
    outline: Any = None  # polygons or run lengths as in COCO
    area: float | None = None  # in pixels, where the file says it: of the outline; else that of the box


@dataclass(frozen=True)
class Picture:
    """A picture and the objects in it that training sees."""

    file: Path
    id: int
    width: int
    height: int
    boxes: NDArray[np.float32]  # [n, 4] left, top, right, bottom, inside the picture
    labels: NDArray[np.int64]  # [n], 1 … number of categories; 0 is the background
    outlines: tuple[Any, ...]  # n of them, where objects have outlines


@dataclass(frozen=True)
class DetectionSet:
    name: str
    pictures: tuple[Picture, ...]
    categories: tuple[tuple[int, str], ...]  # official id and name; label k is the k-th
    truth: dict[str, Any]  # every object in COCO's format, as the files have it: what detections are scored by
    notes: dict[str, int]  # what was clipped or skipped, and how often

    def __len__(self) -> int:
        return len(self.pictures)

    @cached_property
    def fingerprint(self) -> str:
        """Changes when any picture's name, box or label does."""
        digest = hashlib.blake2b(digest_size=16)
        for picture in self.pictures:
            digest.update(f"{picture.file.name} {picture.width} {picture.height} ".encode())
            digest.update(picture.boxes.tobytes() + picture.labels.tobytes())
        return digest.hexdigest()

    def with_objects(self) -> "DetectionSet":
        """Without pictures that show nothing to train on, as detectron2 leaves them out of training."""
        kept = tuple(picture for picture in self.pictures if len(picture.labels))
        if not kept:
            raise UserError(f"{self.name} has no picture with an object in it: there is nothing to train on")
        left_out = len(self.pictures) - len(kept)
        notes = self.notes | ({"pictures without objects left out of training": left_out} if left_out else {})
        return DetectionSet(self.name, kept, self.categories, self.truth, notes)


class Collector:
    """Gathers pictures and objects, checks them, and makes a DetectionSet of them."""

    def __init__(self, name: str, categories: Iterable[tuple[int, str]], skip_broken: bool) -> None:
        self.name, self.skip_broken = name, skip_broken
        self.categories = tuple(categories)
        self.label = {key: place for place, pair in enumerate(self.categories, 1) for key in pair}
        self.notes: Counter[str] = Counter()
        self.pictures: list[Picture] = []
        self.images: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []

    def refuse(self, sentence: str, what: str) -> None:
        """Stop with the sentence, or count the thing as skipped where the user said so."""
        if not self.skip_broken:
            raise UserError(f"{sentence}; mend it, or pass --skip-broken true to leave such {what} out")
        self.notes[f"{what} skipped as broken"] += 1

    def add(self, file: Path, picture_id: int, width: int, height: int, objects: Iterable[Object]) -> None:
        boxes, labels, outlines = [], [], []
        annotations: list[dict[str, Any]] = []
        for item in objects:
            if item.category not in self.label:
                known = ", ".join(name for _, name in self.categories[:30])
                kind = f"the unknown category {item.category!r} (known: {known})"
                self.refuse(f"{file.name} in {self.name} has an object of {kind}", "objects")
                continue
            box = self._clip(item.box, width, height)
            if box is None:
                continue
            label = self.label[item.category]
            annotations.append(self._annotation(item, picture_id, self.categories[label - 1][0], len(annotations)))
            if item.trained_on:
                boxes.append(box)
                labels.append(label)
                outlines.append(item.outline)
        self.images.append({"id": picture_id, "file_name": file.name, "width": width, "height": height})
        self.annotations += annotations
        shape = np.asarray(boxes, np.float32).reshape(-1, 4)
        self.pictures.append(
            Picture(file, picture_id, width, height, shape, np.asarray(labels, np.int64), tuple(outlines))
        )

    def _clip(self, box: tuple[float, ...], width: int, height: int) -> NDArray[np.float32] | None:
        raw = np.asarray(box, np.float64)
        cut = np.clip(raw, 0, [width, height, width, height])
        if not np.isfinite(raw).all() or (cut[2:] - cut[:2] < SMALLEST_SIDE).any():
            self.notes["boxes without area in the picture skipped"] += 1
            return None
        if np.abs(cut - raw).max() > 0.01:  # less is a rounding in the file
            self.notes[CLIPPED] += 1
        return cut.astype(np.float32)

    def _annotation(self, item: Object, picture_id: int, category_id: int, place: int) -> dict[str, Any]:
        left, top, right, bottom = item.box
        row = {
            "id": len(self.annotations) + place + 1,  # from 1: scorers take 0 for "not matched"
            "image_id": picture_id,
            "category_id": category_id,
            "bbox": [left, top, right - left, bottom - top],
            "area": (right - left) * (bottom - top) if item.area is None else item.area,
            "iscrowd": int(item.ignored),
        }
        return row | ({"segmentation": item.outline} if item.outline is not None else {})

    def finish(self) -> DetectionSet:
        """The set, once every picture's file has been looked at."""
        good = self._check_files()
        if not good:
            raise UserError(f"{self.name} has no usable picture: choose another part with --train-part and --test-part")
        images = [image for image in self.images if image["id"] in good]
        annotations = [row for row in self.annotations if row["image_id"] in good]
        categories = [{"id": number, "name": name} for number, name in self.categories]
        truth = {"images": images, "annotations": annotations, "categories": categories}
        pictures = tuple(picture for picture in self.pictures if picture.id in good)
        return DetectionSet(self.name, pictures, self.categories, truth, dict(self.notes))

    def _check_files(self) -> set[int]:
        """Ids of the pictures whose file is there, can be read and has the annotated size.

        Only headers are read, unless broken pictures are to be skipped: then each is decoded, which takes a while.
        """
        good = set()
        with ThreadPoolExecutor(8) as pool:
            faults = pool.map(lambda picture: _fault(picture, decode=self.skip_broken), self.pictures)
            for picture, fault in zip(self.pictures, faults, strict=True):
                if fault is None:
                    good.add(picture.id)
                else:
                    self.refuse(f"{picture.file} {fault}", "pictures")
        return good


def _fault(picture: Picture, decode: bool) -> str | None:
    """What is wrong with a picture's file, as far as its header, or else its pixels, tell."""
    try:
        with Image.open(picture.file) as image:
            size = image.size
            if decode:
                image.load()
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return "cannot be read as a picture"
    if size != (picture.width, picture.height):
        return f"has {size[0]}×{size[1]} pixels, and its annotation says {picture.width}×{picture.height}"
    return None
