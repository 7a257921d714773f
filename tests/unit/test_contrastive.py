"""Losses of the two-view methods against plain float64 loops of their equations."""

import math

import pytest
import torch
import torch.nn.functional as F

from onecrop.augment import normalise
from onecrop.bank import Queue
from onecrop.errors import UserError
from onecrop.losses.contrastive import (
    cluster_accuracy,
    info_nce,
    negative_cosine,
    noise_contrastive,
    nt_xent,
    pair_accuracy,
    patch_clustering,
)
from onecrop.methods.jigclu import cut, stitch


def unit(count, seed, dim=6):
    x = torch.randn(count, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return F.normalize(x, dim=1)


def dot(a, b):
    return sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))


def test_nt_xent():
    a, b = unit(4, 0), unit(4, 1)
    views = [*a, *b]
    total = 0.0
    for i, z in enumerate(views):
        others = [math.exp(dot(z, other) / 0.3) for k, other in enumerate(views) if k != i]
        total -= math.log(math.exp(dot(z, views[(i + 4) % 8]) / 0.3) / sum(others))
    assert nt_xent(a, b, 0.3).item() == pytest.approx(total / 8, abs=1e-12)


def test_info_nce_and_its_constant_sides():
    query, key, queue = unit(3, 0).requires_grad_(), unit(3, 1).requires_grad_(), unit(10, 2).requires_grad_()
    total = 0.0
    for q, k in zip(query, key, strict=True):
        positive = math.exp(dot(q, k) / 0.2)
        total -= math.log(positive / (positive + sum(math.exp(dot(q, n) / 0.2) for n in queue)))
    loss = info_nce(query, key, queue, 0.2)
    assert loss.item() == pytest.approx(total / 3, abs=1e-12)
    loss.backward()
    assert query.grad.abs().sum() > 0
    assert key.grad is None
    assert queue.grad is None


def test_negative_cosine_stops_the_gradient():
    prediction, target = torch.randn(3, 5).requires_grad_(), torch.randn(3, 5).requires_grad_()
    loss = negative_cosine(prediction, target)
    expected = -sum(dot(p, t) / p.norm().item() / t.norm().item() for p, t in zip(prediction, target, strict=True)) / 3
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    loss.backward()
    assert prediction.grad.abs().sum() > 0
    assert target.grad is None


def test_noise_contrastive():
    generator = torch.Generator().manual_seed(0)
    positive = torch.rand(3, dtype=torch.float64, generator=generator) * 5
    negatives = torch.rand(3, 4, dtype=torch.float64, generator=generator)
    normaliser, images, total = 7.0, 50, 0.0
    for p, row in zip(positive.tolist(), negatives.tolist(), strict=True):
        own = p / normaliser
        total -= math.log(own / (own + 4 / images))
        for n in row:
            drawn = n / normaliser
            total -= math.log(1 - drawn / (drawn + 4 / images))
    got = noise_contrastive(positive, negatives, torch.tensor(normaliser, dtype=torch.float64), images)
    assert got.item() == pytest.approx(total / 3, abs=1e-12)


def test_patch_clustering():
    z, image = unit(8, 3), torch.tensor([0, 1, 0, 1, 1, 0, 1, 0])
    total = 0.0
    for i in range(8):
        others = sum(math.exp(dot(z[i], z[k]) / 0.3) for k in range(8) if k != i)
        positives = [p for p in range(8) if p != i and image[p] == image[i]]
        total -= sum(math.log(math.exp(dot(z[i], z[p]) / 0.3) / others) for p in positives) / len(positives)
    assert patch_clustering(z, image, 0.3).item() == pytest.approx(total / 8, abs=1e-12)
    apart = F.one_hot(image, 6).double()
    assert cluster_accuracy(apart, image) == 1
    assert cluster_accuracy(apart, torch.arange(8)) == 0


def test_stitched_pictures_are_cut_back_in_the_same_order():
    patches = torch.arange(12.0).view(12, 1, 1, 1).expand(12, 2, 3, 3)
    pictures = stitch(patches)
    assert pictures.shape == (3, 2, 6, 6)
    assert pictures[1, 0].tolist() == [[4.0] * 3 + [5.0] * 3] * 3 + [[6.0] * 3 + [7.0] * 3] * 3
    assert cut(F.adaptive_avg_pool2d(pictures, 2))[:, 0].tolist() == list(range(12))


def test_jigclu_takes_each_patch_from_its_own_corner():
    """Pictures whose four quarters have their own brightness; corners that do not overlap."""
    from tests.contract.test_methods import build

    made, loader = build("jigclu", overlap=0.0, jitter_probability=0.0, grey_probability=0.0)
    batch = loader.batch(0)
    half = batch.images.shape[-1] // 2
    for corner in range(4):
        y, x = corner // 2 * half, corner % 2 * half
        batch.images[:, :, y : y + half, x : x + half] = 50 * corner
    patches = made.patches(batch).view(4, 8, 3, half, half)
    for corner in range(4):
        expected = normalise(torch.full((1, 3, 1, 1), 50 * corner / 255))
        torch.testing.assert_close(patches[corner], expected.expand_as(patches[corner]), rtol=0, atol=1e-4)


def test_jigclu_refuses_an_odd_size():
    from tests.contract.test_methods import build

    with pytest.raises(UserError, match="must be even"):
        build("jigclu", image_size=17)


def test_pair_accuracy():
    a = torch.eye(4)
    assert pair_accuracy(a, a) == 1
    assert pair_accuracy(a, a.roll(1, 0)) == 0


def test_queue_is_first_in_first_out():
    torch.manual_seed(0)
    queue = Queue(5, 2)
    before = queue.rows.clone()
    queue.push(torch.full((3, 2), 1.0))
    assert torch.equal(queue.rows[:3], torch.full((3, 2), 1.0))
    assert torch.equal(queue.rows[3:], before[3:])
    queue.push(torch.full((3, 2), 2.0))
    assert queue.rows[:, 0].tolist() == [2.0, 1.0, 1.0, 2.0, 2.0]
    queue.push(torch.arange(7.0)[:, None].expand(7, 2))  # longer than the queue: the last five stay
    assert sorted(queue.rows[:, 0].tolist()) == [2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_queue_never_holds_the_current_positives():
    from tests.contract.test_methods import build

    made, loader = build("moco")
    seen = {}
    honest = made.queue.push
    made.queue.push = lambda keys: (seen.update(rows=made.queue.rows.clone(), keys=keys.clone()), honest(keys))
    made(loader.batch(0))
    assert (seen["rows"] @ seen["keys"].T).max() < 1 - 1e-6
    torch.testing.assert_close(made.queue.rows[:8], seen["keys"])
