"""Drawn pictures with objects in them, in the layouts of VOC and COCO: a few coloured rectangles on grey."""

import json

import numpy as np
from PIL import Image

COLOURS = {"dog": (200, 40, 40), "car": (40, 60, 200)}
# picture -> size, then (name, left, top, right, bottom, ignored) in pixels from 0
SCENES = {
    "000001": ((100, 80), [("dog", 10, 10, 50, 60, False), ("car", 60, 20, 90, 70, False)]),
    "000002": ((80, 100), [("car", 20, 30, 70, 80, False), ("dog", 0, 0, 15, 15, True)]),
    "000003": ((100, 80), [("dog", 30, 5, 95, 75, False)]),
    "000004": ((100, 80), []),
}


def draw(size, objects):
    picture = np.full((size[1], size[0], 3), 128, np.uint8)
    for name, left, top, right, bottom, _ in objects:
        picture[top:bottom, left:right] = COLOURS[name]
    return Image.fromarray(picture)


def write_xml(path, size, objects):
    rows = "".join(
        f"<object><name>{name}</name><difficult>{int(ignored)}</difficult><bndbox><xmin>{left + 1}</xmin>"
        f"<ymin>{top + 1}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
        for name, left, top, right, bottom, ignored in objects
    )
    path.write_text(f"<annotation><size><width>{size[0]}</width><height>{size[1]}</height></size>{rows}</annotation>")


def write_voc(folder, year=2007, parts=("trainval", "test")):
    """-> the folder VOCdevkit, with every scene in every part."""
    base = folder / "VOCdevkit" / f"VOC{year}"
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (base / name).mkdir(parents=True)
    for stem, (size, objects) in SCENES.items():
        draw(size, objects).save(base / "JPEGImages" / f"{stem}.jpg", quality=95)
        write_xml(base / "Annotations" / f"{stem}.xml", size, objects)
    for part in parts:
        (base / "ImageSets" / "Main" / f"{part}.txt").write_text("\n".join(SCENES) + "\n")
    return folder / "VOCdevkit"


def coco_content():
    """The scenes as a COCO annotation file, with gaps in the ids; the crowd has run lengths, the others polygons."""
    ids = {"dog": 18, "car": 3}
    content = {"images": [], "annotations": [], "categories": [{"id": i, "name": n} for n, i in ids.items()]}
    for stem, (size, objects) in SCENES.items():
        picture = int(stem) * 10
        content["images"].append({"id": picture, "file_name": f"{stem}.jpg", "width": size[0], "height": size[1]})
        for name, left, top, right, bottom, ignored in objects:
            outline = [[left, top, right, top, right, bottom, left, bottom]]
            if ignored:
                mask = np.zeros((size[1], size[0]), np.uint8)
                mask[top:bottom, left:right] = 1
                outline = {"size": [size[1], size[0]], "counts": plain_runs(mask)}
            content["annotations"].append(
                {
                    "id": len(content["annotations"]) + 1,
                    "image_id": picture,
                    "category_id": ids[name],
                    "bbox": [left, top, right - left, bottom - top],
                    "area": (right - left) * (bottom - top),
                    "iscrowd": int(ignored),
                    "segmentation": outline,
                }
            )
    return content


def plain_runs(mask):
    """Lengths of runs of 0, 1, 0, … down the columns."""
    flat = mask.T.reshape(-1)
    edges = np.flatnonzero(np.diff(flat)) + 1
    lengths = np.diff(np.concatenate([[0], edges, [len(flat)]])).tolist()
    return lengths if flat[0] == 0 else [0, *lengths]


def write_coco(folder, content=None, parts=("train2017", "val2017")):
    root = folder / "coco"
    (root / "annotations").mkdir(parents=True)
    for part in parts:
        (root / part).mkdir()
        for stem, (size, objects) in SCENES.items():
            draw(size, objects).save(root / part / f"{stem}.jpg", quality=95)
        (root / "annotations" / f"instances_{part}.json").write_text(json.dumps(content or coco_content()))
    return root
