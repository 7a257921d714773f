"""What the benchmarks share: waiting for the device, and result files."""

import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from onecrop.device import choose_device, describe

# What the published figures of a step were measured with: crops as large as the images, and nothing beyond the paper.
PLAIN = {"crop_resolution": 1.0, "relation": 0.0, "bank_momentum": 0.5}


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def save(result: dict, out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")


def result_file(title: str, rows: list[dict], notes: Sequence[str] = ()) -> dict:
    """What `onecrop results` takes: rows, and all that is needed to get them again."""
    return {
        "title": title,
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": describe(choose_device("auto")),
        "torch": torch.__version__,
        "notes": list(notes),
        "rows": rows,
    }
