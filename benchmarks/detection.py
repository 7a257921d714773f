"""Is a pretrained backbone worth something to a detector? The same short fine-tuning from three starts.

    python benchmarks/detection.py PICTURES --voc VOCdevkit --coco COCO [--out docs/results/detection.json]
    python benchmarks/detection.py PICTURES --voc VOCdevkit --iterations 3 --epochs 1 --size-scale 0.15   # on a CPU

Starts: scratch (nothing is loaded into the detector), the network that pretraining begins with, and the one it ends
with: sid on PICTURES, a folder without labels, ResNet-18 with the standard stem at 224 px. Meant for small copies of
VOC and COCO: scores compare the starts with each other, and with nothing that is published.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import result_file, save

from onecrop import Recipe, pretrain
from onecrop.detect import DetectRecipe, detect
from onecrop.detect.recipe import DEFAULTS, SCHEDULES
from onecrop.nets.backbones import read_backbone, save_backbone, untrained_like


def starts(folder: Path, args: argparse.Namespace) -> dict[str, str]:
    """Name -> weights, as `onecrop detect` takes them."""
    recipe = Recipe(data=args.pictures, out=str(folder / "run"), backbone="resnet18", stem="standard", image_size=224)
    run = pretrain(recipe.override({"epochs": args.epochs, "seed": args.seed}))
    _, facts = read_backbone(run)
    untrained = folder / "untrained" / "backbone.safetensors"
    untrained.parent.mkdir()
    save_backbone(untrained, untrained_like(run, args.seed), facts)
    return {"scratch": "scratch", "untrained": str(untrained), "pretrained": str(run)}


def train(kind: str, data: str, start: str, weights: str, out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A short detection run -> a row of the result."""
    parts = {"train_part": args.train_part, "test_part": args.test_part} if kind == "voc07" else {}
    recipe = DetectRecipe(weights=weights, set=kind, data=data, out=str(out)).override(
        {
            "backbone": "resnet18",
            "scale": args.iterations / SCHEDULES[DEFAULTS[kind][0]].iterations,
            "size_scale": args.size_scale,
            "crops": args.crops,
            "batch_size": args.batch_size,
            "norm_steps": min(200, args.iterations),
            "seed": args.seed,
            **parts,
        }
    )
    begun = time.monotonic()
    rows = detect(recipe)
    facts = {"set": kind, "start": start} | {name: rows[0][name] for name in ("num_train", "num_test", "iterations")}
    scores = {f"{row['evaluation'].split()[1]} {name}": row[name] for row in rows for name in ("AP50", "AP", "AP75")}
    return {**facts, **scores, "seconds": round(time.monotonic() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures")
    parser.add_argument("--voc")
    parser.add_argument("--coco")
    parser.add_argument("--train-part", default="train", help="of VOC")
    parser.add_argument("--test-part", default="val", help="of VOC")
    parser.add_argument("--epochs", type=int, default=200, help="of pretraining")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--size-scale", type=float, default=0.4)
    parser.add_argument("--crops", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for start, weights in starts(folder, args).items():
            for kind, data in (("voc07", args.voc), ("coco", args.coco)):
                if data:
                    rows.append(train(kind, data, start, weights, folder / f"{start}-{kind}", args))
                    print(rows[-1], flush=True)
                    save(result(rows, args), args.out)  # now: the next one may be cut short


def result(rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    note = (
        f"ResNet-18 C4, batch {args.batch_size}, sides × {args.size_scale:g}, {args.crops} crops a picture, "
        f"seed {args.seed}; pretrained: sid, {args.epochs} epochs. Seconds: training and testing. "
        "Sets this small tell starts apart, and compare with nothing published."
    )
    rows = sorted(rows, key=lambda row: row["set"], reverse=True)
    return result_file("Detection on small copies of VOC and COCO", rows, [note])


if __name__ == "__main__":
    main()
