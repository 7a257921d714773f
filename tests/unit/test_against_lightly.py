"""Losses that lightly also has: the same values and gradients, in float64.

noise_contrastive, patch_clustering and the instance losses have no counterpart there.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F

from onecrop.bank import Queue
from onecrop.losses.contrastive import info_nce, negative_cosine, nt_xent

with warnings.catch_warnings():  # what it warns about at import is not ours to mend
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip("lightly.loss", exc_type=ImportError)

SIZES = [(2, 3), (7, 16), (32, 5)]  # batch, length of a feature
TEMPERATURES = [0.07, 0.5, 2.0]


def features(count, dim, seed):
    return torch.randn(count, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def unit(x):
    return F.normalize(x, dim=1)


def assert_same(ours, other, inputs):
    """One number, and the same slope in each input."""
    torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)
    assert ours.dtype == torch.float64
    mine, yours = torch.autograd.grad(ours, inputs), torch.autograd.grad(other, inputs)
    for a, b in zip(mine, yours, strict=True):
        assert a.abs().sum() > 0
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("count", "dim"), SIZES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_nt_xent(count, dim, temperature):
    a, b = features(count, dim, 0), features(count, dim, 1)
    assert_same(nt_xent(unit(a), unit(b), temperature), theirs.NTXentLoss(temperature)(a, b), [a, b])


@pytest.mark.parametrize(("count", "dim"), SIZES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_info_nce_over_three_steps_of_a_queue(count, dim, temperature):
    """Both queues begin with the same rows, are read before they are written, and end alike."""
    queue = Queue(4 * count, dim, torch.float64)
    loss = theirs.NTXentLoss(temperature, memory_bank_size=(4 * count, dim))
    loss.memory_bank.bank = queue.rows.clone()
    for step in range(3):
        query, key = features(count, dim, 2 * step), features(count, dim, 2 * step + 1).detach()
        assert_same(info_nce(unit(query), unit(key), queue.rows, temperature), loss(query, key), [query])
        queue.push(unit(key))
        torch.testing.assert_close(loss.memory_bank.bank, queue.rows, rtol=0, atol=0)
        assert (queue.rows[step * count : (step + 1) * count] - unit(key)).abs().max() == 0


@pytest.mark.parametrize(("count", "dim"), SIZES)
def test_negative_cosine(count, dim):
    prediction, target = features(count, dim, 0), features(count, dim, 1)
    other = theirs.NegativeCosineSimilarity()(prediction, target.detach())
    assert_same(negative_cosine(prediction, target), other, [prediction])


def test_negative_cosine_of_both_sides_is_simsiams_loss():
    """As the methods use it: each view predicts the other, and only predictions are moved."""
    p1, p2, z1, z2 = (features(6, 8, seed) for seed in range(4))
    symmetric = negative_cosine(p1, z2) + negative_cosine(p2, z1)
    criterion = theirs.NegativeCosineSimilarity()
    assert_same(symmetric, criterion(p1, z2.detach()) + criterion(p2, z1.detach()), [p1, p2])
    assert torch.autograd.grad(symmetric, [z1, z2], allow_unused=True) == (None, None)
