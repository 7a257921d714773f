"""What the benchmarks share: waiting for the device, and result files."""

import json
from pathlib import Path

import torch


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def save(result: dict, out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")
