"""Is a pretrained backbone worth something to a detector? The same short fine-tuning from three starts.

    python benchmarks/detection.py train PICTURES --voc VOCdevkit --coco COCO --out FOUND --minutes 8 --jobs 6
    python benchmarks/detection.py score FOUND --out docs/results/detection.json    # anywhere, from the files of FOUND

Starts: scratch (nothing is loaded into the detector), the network that pretraining begins with, and the one it ends
with: sid on PICTURES, a folder without labels, ResNet-18 with the standard stem. The first two are draws of the same
thing: what lies between them is noise. Meant for small copies of VOC and COCO: scores compare the starts with each
other, and with nothing that is published.

`train` goes through the lengths of --iterations, shortest first, and cuts the next one to what fits into --minutes by
the speed of the one before: every row that is there was trained for the steps it says. FOUND is rewritten after every
run: a small file, and one for each length, of a few MB, with what each run printed. Where faster-coco-eval is not
installed, COCO is trained on without masks.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from measuring import result_file, save

from onecrop import Recipe, pretrain
from onecrop.detect import score_run
from onecrop.detect.recipe import DEFAULTS, SCHEDULES
from onecrop.files import read_json_lines
from onecrop.nets.backbones import read_backbone, save_backbone, untrained_like

RUNS, FACTS = "runs-{}.tar.gz", "made.json"
SETS = {"voc": "voc07", "coco": "coco"}
TRAINING = {  # parts of VOC; all of it; pretraining; detection
    **{"train-part": "train", "test-part": "val"},
    **{"minutes": 60.0, "jobs": 1, "seed": 0},
    **{"image-size": 224, "epochs": 200},
    **{"size-scale": 0.4, "crops": 256, "batch-size": 16, "norm-steps": 50},
}
SAFE = 0.85  # of the time left that a run may take by its forecast


class Found(NamedTuple):
    """A finished run and what it took, in seconds."""

    folder: Path
    whole: float
    step: float


def starts(folder: Path, args: argparse.Namespace) -> dict[str, str]:
    """Name -> weights, as `onecrop detect` takes them."""
    seed = args.seed + 1  # another draw than the detector's own from scratch
    recipe = Recipe(data=args.pictures, out=str(folder / "run"), backbone="resnet18", stem="standard")
    run = pretrain(recipe.override({"image_size": args.image_size, "epochs": args.epochs, "seed": seed}))
    _, facts = read_backbone(run)
    untrained = folder / "untrained" / "backbone.safetensors"
    untrained.parent.mkdir()
    save_backbone(untrained, untrained_like(run, seed), facts | {"epoch": 0})
    return {"scratch": "scratch", "untrained": str(untrained), "pretrained": str(run)}


def command(kind: str, weights: str, out: Path, iterations: int, args: argparse.Namespace) -> list[str]:
    """`onecrop detect`, for a process of its own."""
    values = {
        "set": kind,
        "data": args.voc if kind == "voc07" else args.coco,
        "out": out,
        "backbone": "resnet18",
        "scale": iterations / SCHEDULES[DEFAULTS[kind][0]].iterations,
        "size-scale": args.size_scale,
        "crops": args.crops,
        "batch-size": args.batch_size,
        "norm-steps": args.norm_steps,
        "seed": args.seed,
    }
    if kind == "voc07":
        values |= {"train-part": args.train_part, "test-part": args.test_part}
    elif find_spec("faster_coco_eval") is None:
        values |= {"masks": "false", "metric": "voc07"}  # COCO's own score is taken elsewhere, from the files
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "onecrop", "detect", weights, *flags]


def finish(order: list[str], folder: Path, until: float, jobs: int) -> Found:
    """Run it to its end, or until there is no time left."""
    begun = time.monotonic()
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}  # or each run takes all cores for itself
    with folder.with_suffix(".log").open("w") as file:
        streams = {"stdout": file, "stderr": subprocess.STDOUT}
        subprocess.run(order, **streams, env=threads | os.environ, timeout=until - begun, check=True)
    whole = time.monotonic() - begun
    rows = read_json_lines(folder / "metrics.jsonl")
    first = rows[0]["step"] if len(rows) > 1 else 0  # they load kernels; the last have the GPU to themselves
    later = sum(row["seconds"] for row in rows if row["step"] > first)
    return Found(folder, whole, later / (rows[-1]["step"] - first))


def wave(work: Path, weights: dict[str, str], iterations: int, until: float, args: argparse.Namespace) -> list[Found]:
    """Every start on every set, --jobs at a time; one that fails is said and does not end the others."""
    kinds = [kind for name, kind in SETS.items() if getattr(args, name)]
    found = []
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {}
        for kind in kinds:
            for start, path in weights.items():
                folder = work / f"{kind}-{start}-{iterations}"
                order = command(kind, path, folder, iterations, args)
                running[pool.submit(finish, order, folder, until, args.jobs)] = folder
        for future in as_completed(running):
            folder = running[future]
            try:
                found.append(future.result())
                print(f"{folder.name}: {found[-1].whole:.0f} s, {1000 * found[-1].step:.0f} ms a step", flush=True)
            except subprocess.SubprocessError as error:
                late = isinstance(error, subprocess.TimeoutExpired)
                end = "no time left" if late else f"failed with {error.returncode}"
                said = folder.with_suffix(".log").read_text(errors="replace")
                print(f"{folder.name}: {end}\n{said[-1500:]}", flush=True)
            pack(work, args.out, iterations)
    return found


def fitting(asked: int, found: list[Found], earlier: int, left: float, rounds: int) -> int:
    """Of the steps that were asked for, as many as the time left allows by the slowest of the runs before."""
    step = max(one.step for one in found)
    rest = max(one.whole - earlier * one.step for one in found)
    return min(asked, int((SAFE * left / rounds - rest) / step) // 10 * 10)


def pack(work: Path, out: Path, iterations: int) -> None:
    """All that scoring needs of a wave's finished runs, without their checkpoints, and what all of them printed."""
    whole = out / RUNS.format(iterations)
    part = whole.with_suffix(".part")
    with tarfile.open(part, "w:gz") as archive:
        for file in sorted(work.glob(f"*-{iterations}/detections.json")):
            for kept in sorted(file.parent.iterdir()):
                if kept.is_file():
                    archive.add(kept, f"{file.parent.name}/{kept.name}")
        for log in sorted(work.glob(f"*-{iterations}.log")):
            archive.add(log, log.name)
    part.replace(whole)


def train(args: argparse.Namespace) -> None:
    until = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    if any(args.out.glob(RUNS.format("*"))):
        raise SystemExit(f"{args.out} holds runs, which are not overwritten: choose another --out")
    save(result_file("Detection on small copies of VOC and COCO", [], [note(args)]), args.out / FACTS)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        weights = starts(work, args)
        print(f"pretrained; {until - time.monotonic():.0f} s left", flush=True)
        found, earlier = list[Found](), 0
        runs = len(weights) * sum(bool(getattr(args, name)) for name in SETS)
        for asked in sorted(args.iterations):
            left, rounds = until - time.monotonic(), -(-runs // args.jobs)
            iterations = fitting(asked, found, earlier, left, rounds) if found else asked
            if iterations <= earlier:
                print(f"no time for {asked} steps: {left:.0f} s are left", flush=True)
                break
            found, earlier = wave(work, weights, iterations, until, args), iterations
            if not found:
                break


def note(args: argparse.Namespace) -> str:
    return (
        f"ResNet-18 C4, batch {args.batch_size}, sides × {args.size_scale:g}, {args.crops} crops a picture, seed "
        f"{args.seed}. Pretrained: sid, {args.epochs} epochs at {args.image_size} px; untrained: the network it began "
        f"with; scratch: another draw of the same, so what lies between the two is noise. Steps were timed with "
        f"{args.jobs} runs side by side. Sets this small tell starts apart, and compare with nothing published."
    )


def score(args: argparse.Namespace) -> None:
    """The runs of a folder, scored from their files -> one result file."""
    result = json.loads((args.folder / FACTS).read_text())
    with tempfile.TemporaryDirectory() as temporary:
        for file in args.folder.glob(RUNS.format("*")):
            with tarfile.open(file) as archive:
                archive.extractall(temporary, filter="data")
        rows = [row(folder) for folder in Path(temporary).iterdir() if folder.is_dir()]
    if not rows:
        raise SystemExit(f"no run of {args.folder} was finished: what they printed is in {RUNS.format('*')}")
    order = {name: place for place, name in enumerate(("scratch", "untrained", "pretrained"))}
    rows.sort(key=lambda one: (one["set"] == "coco", one["iterations"], order[one["start"]]))
    save(result | {"rows": rows}, args.out)
    for one in rows:
        print(one)


def row(folder: Path) -> dict[str, Any]:
    kind, start, _ = folder.name.split("-")
    scored = score_run(folder, DEFAULTS[kind][1])
    metrics = read_json_lines(folder / "metrics.jsonl")
    seconds = sum(one["seconds"] for one in metrics) / metrics[-1]["step"]
    facts = {"set": kind, "start": start} | {name: scored[0][name] for name in ("num_train", "num_test", "iterations")}
    scores = {f"{one['evaluation'].split()[1]} {name}": one[name] for one in scored for name in ("AP50", "AP", "AP75")}
    return {**facts, "step_ms": 1000 * seconds, **scores}


def lengths(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    training = parts.add_parser("train")
    training.set_defaults(do=train)
    training.add_argument("pictures")
    training.add_argument("--out", type=Path, required=True)
    training.add_argument("--voc", help="the folder VOCdevkit")
    training.add_argument("--coco", help="the folder with annotations/ in it")
    training.add_argument("--iterations", type=lengths, default=[100, 400], help="steps of detection, e.g. 100,400")
    for name, value in TRAINING.items():
        training.add_argument(f"--{name}", type=type(value), default=value, help=f"[{value}]")
    scoring = parts.add_parser("score")
    scoring.set_defaults(do=score)
    scoring.add_argument("folder", type=Path)
    scoring.add_argument("--out", type=Path, help="the result file")
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
