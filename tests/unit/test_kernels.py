"""The GPU's fused kernels against the plain form, on a CPU by Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys

import pytest

CHECK = """
import torch
import torch.nn.functional as F
from onecrop.losses import instance, kernels

torch.manual_seed(0)
z, rows = (F.normalize(torch.randn(n, 16), dim=1) for n in (3, 9001))
c = z @ rows.T
c[0, 5] = c[1, 4096:8192] = instance.LEFT_OUT  # a row, and a whole tile, left out
states = []
for add in (instance._add_statistics, kernels.add_statistics):
    best, sums = torch.full((3,), instance.LEFT_OUT), torch.zeros(4, 3)
    nearest = torch.zeros(3, dtype=torch.int64)
    for start in (0, 5000):  # two blocks, none a multiple of the tile
        add(c[:, start : start + 5000].contiguous(), start, best, nearest, sums, 0.2, 0.7)
    states.append((best, nearest, sums))
for plain, fused in zip(*states, strict=True):
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
normalisers = instance._normalisers(states[0][0], states[0][2], 0.2, 0.7)
for slope in (None, 0.5, -0.5):
    for weight in (None, 20.0):
        arguments = (c, normalisers, 0.2, 0.7, slope, weight, torch.float32)
        plain, fused = instance._slopes(*arguments), kernels.slopes(*arguments)
        assert len(plain) == len(fused) == (2 if slope and weight is None else 1)
        for a, b in zip(plain, fused, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-8)
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this build of torch comes without Triton")
def test_fused_kernels_equal_the_plain_form():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr
