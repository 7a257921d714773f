"""On a CUDA device: fused equals plain, streamed equals resident, bounded memory, whole runs."""

import gc
import json
import signal
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onecrop.cli import main
from onecrop.data.images import ImageSet, Loader
from onecrop.device import Captured, tune
from onecrop.evaluate.features import Probe, RandomViews, labels_on
from onecrop.evaluate.linear import Descent, new_classifier
from onecrop.losses import instance, instance_loss
from onecrop.nets import build_backbone
from onecrop.step import TrainStep
from tests.gpu.test_step import make

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # compilers warn about what is not ours
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "blocks"])
@pytest.mark.parametrize("kl_weight", [None, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_loss_equals_float64(monkeypatch, dense, kl_weight, dtype):
    if not dense:
        monkeypatch.setattr(instance, "DENSE_ELEMENTS", 0)
        monkeypatch.setattr(instance, "BLOCK_ELEMENTS", 64 * 1000)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    rows = F.normalize(torch.randn(7001, 96, device=CUDA), dim=1).to(dtype)
    z = F.normalize(torch.randn(64, 96, device=CUDA), dim=1).to(dtype).float().requires_grad_()
    target = torch.randperm(7001, device=CUDA)[:64]
    mask = torch.rand(64, 7001, device=CUDA) < 0.1
    mask[torch.arange(64), target] = mask[torch.arange(64), target.roll(1)] = False
    more = {"temperature": 0.2, "kl_temperature": 0.7, "mixed_target": target.roll(1), "mix": 0.7, "mask": mask}
    exact_z = z.detach().double().requires_grad_()
    exact = instance_loss(exact_z, rows.double(), target, **more)
    fused = instance_loss(z, rows, target, kl_weight=kl_weight, **more)
    weight = kl_weight or 3.0
    (exact.cross_entropy + weight * exact.sqrt_kl).backward()
    (fused.cross_entropy + weight * fused.sqrt_kl).backward()
    close = 1e-5 if dtype == torch.float32 else 2e-3
    assert fused.cross_entropy.item() == pytest.approx(exact.cross_entropy.item(), rel=close)
    assert fused.sqrt_kl.item() == pytest.approx(exact.sqrt_kl.item(), rel=20 * close)
    assert fused.accuracy.item() == pytest.approx(exact.accuracy.item(), abs=0.02)
    torch.testing.assert_close(
        fused.batch_probabilities.double(), exact.batch_probabilities, rtol=30 * close, atol=1e-9
    )
    error = (z.grad - exact_z.grad).norm() / exact_z.grad.norm()
    assert error < 3 * close


@pytest.mark.parametrize(("batch", "count", "dim"), [(512, 50_001, 256), (48, 3001, 32), (200, 700, 128)])
@pytest.mark.parametrize("kl", ["sqrt", "none"])
def test_the_sweep_over_short_rows_equals_float64(batch, count, dim, kl):
    """Loss, gradient and relation in kernels that store no cosine, CutMix included."""
    torch.manual_seed(0)
    rows = F.normalize(torch.randn(count, dim, device=CUDA), dim=1).bfloat16()
    from onecrop.losses import sweep

    assert sweep.takes(dim, rows.dtype, 0.1)
    target = torch.randperm(count, device=CUDA)[:batch]
    z = F.normalize(rows[target].float() + 0.1 * torch.randn(batch, dim, device=CUDA), dim=1).bfloat16().float()
    z.requires_grad_()
    more = {"temperature": 0.2, "kl_temperature": 0.7, "mixed_target": target.roll(1), "mix": 0.7, "kl": kl}
    exact_z = z.detach().double().requires_grad_()
    exact = instance_loss(exact_z, rows.double(), target, relation=instance.Relation(0.5, 0.1), **more)
    fused = instance_loss(z, rows, target, kl_weight=20.0, relation=instance.Relation(0.5, 0.1), **more)
    for out in (exact, fused):
        (out.cross_entropy + 20.0 * out.sqrt_kl).backward()
    assert fused.cross_entropy.item() == pytest.approx(exact.cross_entropy.item(), rel=1e-4)
    assert fused.sqrt_kl.item() == pytest.approx(exact.sqrt_kl.item(), rel=1e-3, abs=1e-6)
    assert fused.accuracy.item() == pytest.approx(exact.accuracy.item(), abs=0.01)
    torch.testing.assert_close(fused.batch_probabilities.double(), exact.batch_probabilities, rtol=0.01, atol=1e-9)
    assert (z.grad - exact_z.grad).norm() / exact_z.grad.norm() < 6e-3


def test_streamed_loss_needs_little_memory():
    """512 images against 400,000 rows: a dense logit matrix alone would be 0.8 GB."""
    rows = F.normalize(torch.randn(400_000, 128, device=CUDA, dtype=torch.bfloat16), dim=1)
    z = F.normalize(torch.randn(512, 128, device=CUDA), dim=1).requires_grad_()
    target = torch.arange(512, device=CUDA)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    instance_loss(z, rows, target, temperature=0.2, kl_temperature=1.0, kl_weight=20.0).cross_entropy.backward()
    assert torch.cuda.max_memory_allocated() - before < 300 * 2**20


@pytest.mark.parametrize("part", [False, True])
def test_data_beyond_device_memory_gives_the_same_batches(monkeypatch, tmp_path, part):
    pixels = np.memmap(tmp_path / "images.bin", np.uint8, "w+", shape=(700 if part else 500, 3, 16, 16))
    pixels[:] = np.random.default_rng(0).integers(0, 255, pixels.shape, np.uint8)
    images = ImageSet("noise", pixels)
    chosen = np.random.default_rng(1).permutation(700)[:500]
    images = images.take(chosen) if part else images
    resident = Loader(images, 32, CUDA, seed=1)
    monkeypatch.setattr("onecrop.data.images.RESIDENT_SHARE", 0.0)
    streamed = Loader(images, 32, CUDA, seed=1)
    assert resident.resident
    assert not streamed.resident
    assert np.array_equal(resident.images.cpu().numpy(), images.images[:])
    for step in (0, 1, 2, 3, 14, 15, 16, 40, 2):  # in order, over an epoch's end, and jumps
        a, b = resident.batch(step), streamed.batch(step)
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.index, b.index)
        assert torch.equal(a.aspect, b.aspect)
    for (a, _), (b, _) in zip(resident.in_order(), streamed.in_order(), strict=True):
        assert torch.equal(a.images, b.images)


@pytest.mark.parametrize("slow", [False, True])
def test_waiting_for_data_is_counted_only_while_the_device_is_idle(monkeypatch, slow):
    images = ImageSet("noise", np.random.default_rng(0).integers(0, 255, (500, 3, 16, 16), np.uint8))
    monkeypatch.setattr("onecrop.data.images.RESIDENT_SHARE", 0.0)
    loader = Loader(images, 32, CUDA, seed=1)
    batch, operand = loader.empty(), torch.randn(8192, 8192, device=CUDA)
    if slow:
        gather = loader._reader._gather
        monkeypatch.setattr(loader._reader, "_gather", lambda step: (time.sleep(0.05), gather(step))[1])
    operand @ operand  # loads the library
    torch.cuda.synchronize()
    started = time.monotonic()
    for step in range(10):
        loader.refill(batch, step)
        if not slow:
            operand @ operand  # the host runs ahead of this
    torch.cuda.synchronize()
    share = loader.seconds_waited / (time.monotonic() - started)
    assert share > 0.8 if slow else share < 0.1


def test_augmentation_is_the_same_on_both_devices():
    method, step = make(False)
    batch = step.loader.batch(3)
    on_gpu = method.augment(batch.images, batch.aspect, batch.draws)
    draws = batch.draws._replace(key=batch.draws.key.cpu())
    on_cpu = method.augment.cpu()(batch.images.cpu(), batch.aspect.cpu(), draws)
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=0, atol=2e-3)


def test_pretrain_and_evaluate_by_the_command_line(tmp_path):
    run = tmp_path / "run"
    small = "--backbone tiny --subset 2000 --batch-size 128 --dim 64 --hidden 128 --epochs 6 --cutmix 0".split()
    assert main(["pretrain", "shapes", "--out", str(run), *small]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["cross_entropy"] < rows[0]["cross_entropy"]
    assert rows[-1]["peak_memory"] > 0
    assert main(["evaluate", str(run), "--with", "knn,linear-fast"]) == 0


@pytest.mark.parametrize("flags", ["--update soft --mixing image --bank-momentum-end 0.9", "--method simsiam"])
def test_a_run_that_the_system_ends_goes_on(tmp_path, monkeypatch, flags):
    flags = f"{flags} --backbone efficientnet_b0 --subset 2000 --batch-size 128 --epochs 3 --image-size 32".split()
    honest = TrainStep.__call__

    def ended(self, step, lr, progress):
        honest(self, step, lr, progress)
        if step == 20:
            signal.raise_signal(signal.SIGTERM)

    run = ["pretrain", "shapes", "--out", str(tmp_path / "run"), *flags]
    with monkeypatch.context() as patched:
        patched.setattr(TrainStep, "__call__", ended)
        assert main(run) == 130
    assert main([*run, "--resume"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3]


def test_a_probe_captured_as_graphs_equals_one_that_is_not(monkeypatch):
    tune(CUDA)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    images = ImageSet(
        "noise", rng.integers(0, 255, (2500, 3, 32, 32), np.uint8), rng.integers(0, 5, 2500), tuple("abcde")
    )
    backbone, probe = build_backbone("tiny", "small").to(CUDA).eval(), Probe(32, CUDA)
    found = []
    for captured in (True, False):
        if not captured:
            monkeypatch.setattr(Captured, "__call__", lambda self, *given: self.work(*given))
        views = RandomViews(backbone, images, probe, crop_scale=0.08)
        descent = Descent(new_classifier(backbone.dim, 5, probe), weight_decay=1e-4)
        seen = torch.stack([views(0), views(1), views(0)])
        for part in range(6):
            rows = slice(256 * part, 256 * (part + 1))
            descent(seen[1, rows], labels_on(images, CUDA)[rows], 0.5 / (1 + part))
        assert (views.look.graph is not None) == (descent.step.graph is not None) == captured
        found.append((seen, descent.classifier.weight))
    torch.testing.assert_close(found[0][0][0], found[0][0][2], rtol=0, atol=0)  # a view is the same each time
    assert (found[0][0][0] - found[0][0][1]).abs().max() > 0.01
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-2, atol=1e-3)


def test_a_second_run_in_one_process_needs_no_more_memory_than_the_first(tmp_path):
    peaks, left = [], []
    for name in ("first", "second"):
        flags = "--subset 2000 --epochs 2 --backbone tiny --batch-size 64 --dim 64 --hidden 128 --compile true"
        assert main(["pretrain", "shapes", *flags.split(), "--out", str(tmp_path / name)]) == 0
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        peaks.append(json.loads(rows[-1])["peak_memory"])
        gc.collect()
        left.append(torch.cuda.memory_allocated())
    # the first one's may be higher: to time its kernels, a compiler fills a buffer as large as the cache
    assert peaks[1] <= 1.02 * peaks[0], (peaks, left)
    assert left[1] <= left[0], (peaks, left)
