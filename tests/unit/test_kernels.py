"""The GPU's fused kernels on a CPU: against the plain form by Triton's interpreter, and compiled for GPUs elsewhere."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import onecrop.losses
from onecrop.losses import instance

CHECK = """
import torch
import torch.nn.functional as F
from onecrop.losses import kernels, plain

torch.manual_seed(0)
z, rows = (F.normalize(torch.randn(n, 16), dim=1) for n in (3, 9001))
c = z @ rows.T
c[0, 5] = c[1, 4096:8192] = plain.LEFT_OUT  # a row, and a whole tile, left out
states = []
for add in (plain.add_statistics, kernels.add_statistics):
    best, sums = torch.full((3,), plain.LEFT_OUT), torch.zeros(4, 3)
    nearest = torch.zeros(3, dtype=torch.int64)
    for start in (0, 5000):  # two blocks, none a multiple of the tile
        add(c[:, start : start + 5000].contiguous(), start, best, nearest, sums, 0.2, 0.7)
    states.append((best, nearest, sums))
for eager, fused in zip(*states, strict=True):
    torch.testing.assert_close(fused, eager, rtol=1e-4, atol=1e-5)
normalisers = plain.normalisers(states[0][0], states[0][2], 0.2, 0.7)
for slope in (None, 0.5, -0.5):
    for weight in (None, 20.0):
        arguments = (c, normalisers, 0.2, 0.7, slope, weight, torch.float32)
        eager, fused = plain.slopes(*arguments), kernels.slopes(*arguments)
        assert len(eager) == len(fused) == (2 if slope and weight is None else 1)
        for a, b in zip(eager, fused, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-8)
print("equal")
"""


SWEEP = """
import torch
import torch.nn.functional as F
from onecrop.losses import instance, plain, sweep

torch.manual_seed(0)
for batch, count, dim in ((3, 700, 32), (70, 64, 64), (130, 333, 32)):  # tiles and parts that do not divide
    z, rows = (F.normalize(torch.randn(n, dim), dim=1) for n in (batch, count))  # its bfloat16 is broken
    target = torch.randperm(count)[:batch] if batch <= count else torch.arange(batch) % count
    c = z @ rows.T
    best, sums = torch.full((batch,), plain.LEFT_OUT), torch.zeros(4, batch)
    nearest = torch.zeros(batch, dtype=torch.int64)
    plain.add_statistics(c, 0, best, nearest, sums, 0.2, 0.7)
    eager = plain.normalisers(best, sums, 0.2, 0.7)
    other, sums = sweep.statistics(z, rows, target, 0.2, 0.7)
    fused = plain.normalisers(torch.ones(batch), sums, 0.2, 0.7)
    for a, b in zip(eager, fused, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(other, c.scatter(1, target[:, None], -2.0).amax(1), rtol=1e-4, atol=1e-4)
    for slope, weight in ((0.5, 20.0), (None, None)):
        expected = plain.slopes(c, eager, 0.2, 0.7, slope, weight, torch.float32)[0] @ rows
        dz = sweep.gradient(z, rows, eager, 0.2, 0.7, 0.0 if slope is None else slope * weight / 0.7)
        assert (dz - expected).norm() < 1e-4 * expected.norm()
    expected = instance.related(rows.double(), target, 0.1, None, torch.float64)
    out, total = sweep.neighbours(rows[target], rows, target, 0.1)
    assert (out / total[:, None] - expected).norm() < 1e-4 * expected.norm()
print("equal")
"""


PARTS = """
import torch
import torch.nn.functional as F
from onecrop.losses import instance, plain, sweep

class Group:  # of two processes; what each of them has is heard first, and then put together
    size, heard = 2, []
    def stack(self, x):
        if len(self.heard) < 2:
            self.heard.append(x)
        return torch.stack((self.heard * 2)[:2])

torch.manual_seed(0)
batch, count, first = 5, 300, 130
z, rows = (F.normalize(torch.randn(n, 32), dim=1) for n in (batch, count))
target = torch.tensor([4, 299, 130, 129, 77])
z[0], z[1] = rows[4], rows[299]  # two of them are their rows: a hit on either process
whole, sums = sweep.statistics(z, rows, target, 0.2, 0.7)
expected = plain.normalisers(torch.ones(batch), sums, 0.2, 0.7)
halves = [(rows[:first], torch.where(target < first, target, -1)),
          (rows[first:], torch.where(target >= first, target - first, -1))]
group = Group()
for _ in range(2):
    for half, place in halves:
        best, sums = sweep.statistics(z, half, place, 0.2, 0.7)
        cosine = (z * half[place]).sum(-1)
        one, sums, hit = instance._put_together(
            torch.ones(batch), sums, torch.maximum(best, cosine), cosine > best, place, 0.2, 0.7, group)
found = plain.normalisers(one, sums, 0.2, 0.7)
for a, b in zip(expected, found, strict=True):
    torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
assert hit.tolist() == [True, True, False, False, False]
dz = sum(sweep.gradient(z, half, expected, 0.2, 0.7, 1.5) for half, _ in halves)
torch.testing.assert_close(dz, sweep.gradient(z, rows, expected, 0.2, 0.7, 1.5), rtol=1e-4, atol=1e-5)
outs, totals = zip(*(sweep.neighbours(rows[target], half, place, 0.1) for half, place in halves))
out, total = sweep.neighbours(rows[target], rows, target, 0.1)
torch.testing.assert_close(sum(outs) / sum(totals)[:, None], out / total[:, None])
print("equal")
"""


def why_not():
    """Why Triton's interpreter cannot run here, or "" where it can."""
    try:
        triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    except PackageNotFoundError:
        return "this build of torch comes without Triton"
    # it calls int() on an array of one element, which numpy takes no more
    return "the interpreter of Triton 3.6 is older than numpy 2.4" if triton <= (3, 6) and numpy >= (2, 4) else ""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("check", [CHECK, SWEEP, PARTS], ids=["element-wise", "sweep", "parts"])
def test_fused_kernels_equal_the_plain_form(check):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr


COMPILE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from onecrop.losses import kernels, sweep

capability, room = map(int, sys.argv[1:])

class Device:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", capability, 32)
    def get_active_torch_device(self): return torch.device("cpu")

made = []
driver.set_active(Device())
JITFunction.__getitem__ = lambda kernel, grid: lambda *a, **k: made.append(kernel.warmup(*a, grid=grid, **k))
sweep._size = lambda device: (46, room)
for batch, dim in ((512, 256), (512, 128), (64, 256)) if capability >= 80 else ():  # older ones have no bfloat16
    z, rows, target = torch.zeros(batch, dim).bfloat16(), torch.zeros(1000, dim).bfloat16(), torch.arange(batch)
    normalisers = [torch.zeros(batch)] * 4
    sweep.statistics(z, rows, target, 0.2, 1.0)
    sweep.gradient(z, rows, normalisers, 0.2, 1.0, 10.0)
    sweep.neighbours(z, rows, target, 0.1)
c, three = torch.zeros(3, 5000), torch.zeros(3)
kernels.add_statistics(c, 0, three, three.long(), torch.zeros(4, 3), 0.2, 1.0)
kernels.slopes(c, [three] * 4, 0.2, 1.0, 0.5, 20.0, torch.float32)
for one in made:
    assert one.asm["cubin"]
    print(one.metadata.shared)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="this build of torch comes without Triton")
@pytest.mark.parametrize(
    ("capability", "shared", "count"),  # shared memory of a multiprocessor, of which a program gets all but 1 kB
    [(75, 65_536, 2), (80, 167_936, 11), (86, 102_400, 11), (90, 233_472, 11), (120, 102_400, 11)],
    ids=["T4", "A100", "RTX 30", "H100", "RTX 50"],
)
def test_kernels_compile_for_gpus_that_are_not_here_and_fit_them(tmp_path, capability, shared, count):
    order = [sys.executable, "-W", "error", "-c", COMPILE, str(capability), str(shared)]
    done = subprocess.run(order, env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True)
    needed = [int(line) for line in done.stdout.split()]
    assert len(needed) == count, done.stderr
    assert max(needed) <= shared - 1024


def test_a_gpu_without_triton_works_as_a_cpu_does(monkeypatch):
    """As on Windows: torch brings no Triton along there. Pretended tensors: what touches a kernel fails."""
    monkeypatch.setattr(instance, "triton_works", lambda: False)
    monkeypatch.setitem(sys.modules, "onecrop.losses.kernels", None)
    monkeypatch.setitem(sys.modules, "onecrop.losses.sweep", None)
    monkeypatch.delattr(onecrop.losses, "sweep", raising=False)
    with FakeTensorMode():
        z = torch.empty(8, 32, device="cuda", requires_grad=True)
        rows, target = torch.empty(50, 32, device="cuda", dtype=torch.bfloat16), torch.arange(8, device="cuda")
        relation = instance.Relation(0.5, 0.1)
        out = instance.instance_loss(
            z, rows, target, temperature=0.2, kl_temperature=1.0, kl_weight=20.0, relation=relation
        )
    assert out.cross_entropy.is_cuda
    assert instance.loss_bytes(8, 50, 32, torch.bfloat16, torch.device("cuda")) == 8 * 50 * (4 + 2)
