"""benchmarks/cost.py: every method gets a row, with its settings changed as asked."""

import json
import os
import subprocess
import sys
from pathlib import Path

from onecrop.methods import METHODS


def test_every_method_has_its_cost(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "cost.py"
    methods = [*(name for name in METHODS if name != "sid"), "sid:dim=16 hidden=32 calibrate=false"]
    sizes = ["--backbones", "tiny", "--images", "64", "--batch-size", "8", "--steps", "1"]
    command = [sys.executable, script, "--methods", ",".join(methods), *sizes, "--out", tmp_path / "cost.json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "cost.json").read_text())["rows"]
    assert [row["method"] for row in rows] == methods
    assert all(row["step_ms"] > 0 and row["crops"] == METHODS[row["method"].split(":")[0]].crops for row in rows)
    assert rows[-1]["calibration_seconds"] is None
