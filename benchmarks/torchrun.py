"""What does torchrun cost where it is not needed: the same run with and without it, one process, one GPU?

    python benchmarks/torchrun.py [--rounds 3] [--out docs/benchmarks/torchrun.json]
    python benchmarks/torchrun.py --flags "--backbone tiny --batch-size 64" --subset 1024 --epochs 6     # on a CPU

Whole runs of `onecrop pretrain`, by turns; the speed of an epoch is what the run writes into metrics.jsonl, without its
start and compilation. The goal is a ratio of at most 1.02.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measuring import save

from onecrop.device import choose_device, describe

LAUNCHERS = {
    "plain": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"],
}
FIRST_EPOCHS = 2  # still warming up


def microseconds(launcher: list[str], run: Path, args: argparse.Namespace) -> list[float]:
    """An image takes so long, epoch by epoch."""
    flags = f"--subset {args.subset} --epochs {args.epochs} {args.flags}".split()
    done = subprocess.run(
        [*launcher, "-m", "onecrop", "pretrain", "shapes", *flags, "--out", str(run)], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [1e6 / row["images_per_second"] for row in rows[FIRST_EPOCHS:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--subset", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--flags", default="--backbone resnet18 --batch-size 512 --optimizer sgd", help="of the run")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for name, launcher in LAUNCHERS.items():
                epochs = microseconds(launcher, Path(folder) / f"{name}-{number}", args)
                times[name].append(statistics.median(epochs))
                print(f"round {number + 1}, {name}: {times[name][-1]:.3f} µs an image", flush=True)
    plain, under = (statistics.median(times[name]) for name in LAUNCHERS)
    result = {
        "device": describe(choose_device("auto")),
        "torch": torch.__version__,
        "settings": {"rounds": args.rounds, "subset": args.subset, "epochs": args.epochs, "flags": args.flags},
        "microseconds_an_image": times,
        "ratio": under / plain,
    }
    print(json.dumps(result, indent=2))
    save(result, args.out)


if __name__ == "__main__":
    main()
