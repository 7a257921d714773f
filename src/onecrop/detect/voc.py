"""PASCAL VOC: VOCdevkit/VOC<year> with Annotations/*.xml, JPEGImages/*.jpg and ImageSets/Main/<part>.txt."""

import math
from pathlib import Path
from xml.etree import ElementTree

from onecrop.detect.sets import Collector, DetectionSet, Object
from onecrop.errors import UserError

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)


def load_voc(folder: Path, years: tuple[int, ...], part: str, skip_broken: bool = False) -> DetectionSet:
    """The pictures of one part (trainval, test, …) of one or more years.

    Difficult objects are trained on, as detectron2 does, and left out of the score, as VOC does.
    """
    root = next((root for root in (folder, folder / "VOCdevkit") if (root / f"VOC{years[0]}").is_dir()), None)
    if root is None:
        raise UserError(f"no VOC{years[0]} in {folder}: --data is the folder VOCdevkit, or the one that holds it")
    name = "+".join(f"VOC{year}" for year in years) + f" {part}"
    collector = Collector(name, enumerate(CLASSES, 1), skip_broken)
    for year in years:
        base = root / f"VOC{year}"
        for stem in _names(base, part):
            _add(collector, base, stem)
    return collector.finish()


def _names(base: Path, part: str) -> list[str]:
    file = base / "ImageSets" / "Main" / f"{part}.txt"
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        parts = sorted(path.stem for path in file.parent.glob("*.txt") if "_" not in path.stem)
        there = f"it has {', '.join(parts)}: choose with --train-part and --test-part" if parts else "it has no lists"
        raise UserError(f"{file} cannot be read, the list of the part {part!r}; {there}") from None
    names = list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))
    if not names:
        raise UserError(f"{file} names no picture: choose another part with --train-part and --test-part")
    return names


def _add(collector: Collector, base: Path, stem: str) -> None:
    file = base / "Annotations" / f"{stem}.xml"
    try:
        root = ElementTree.parse(file).getroot()
        width, height = (int(_text(root, f"size/{side}")) for side in ("width", "height"))
        objects = [_object(node) for node in root.findall("object")]
        if min(width, height) < 1:
            raise ValueError(f"a size of {width}×{height}")
    except (OSError, ElementTree.ParseError, ValueError, LookupError) as error:  # the last: an unknown encoding
        fault = "is missing" if isinstance(error, FileNotFoundError) else f"is not a VOC annotation ({error})"
        collector.refuse(f"{file} {fault}", "annotations")
        return
    picture = base / "JPEGImages" / f"{stem}.jpg"
    collector.add(picture, len(collector.pictures) + 1, width, height, objects)


def _object(node: ElementTree.Element) -> Object:
    left, top, right, bottom = (float(_text(node, f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax"))
    if not all(map(math.isfinite, (left, top, right, bottom))):
        raise ValueError("a box that is no number")
    # VOC counts pixels from 1 and includes the last: 1 … W is the whole width
    box = (left - 1, top - 1, right, bottom)
    return Object(_text(node, "name"), box, ignored=(node.findtext("difficult") or "0").strip() == "1")


def _text(node: ElementTree.Element, path: str) -> str:
    text = node.findtext(path)
    if text is None:
        raise ValueError(f"no <{path}>")
    return text.strip()
