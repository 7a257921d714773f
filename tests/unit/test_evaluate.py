import math
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn

from onecrop.data.images import ImageSet
from onecrop.evaluate import EVALUATIONS, Probe
from onecrop.evaluate.features import extract
from onecrop.evaluate.knn import knn_predict
from onecrop.map import nearest
from onecrop.nets import Pixels, build_backbone

CPU = torch.device("cpu")
probes = import_module("onecrop.evaluate.linear")  # the package has a function of that name


def test_knn_equals_brute_force(monkeypatch):
    monkeypatch.setattr(import_module("onecrop.evaluate.knn"), "CHUNK", 4)
    generator = torch.Generator().manual_seed(0)
    bank, queries = torch.randn(30, 5, generator=generator), torch.randn(11, 5, generator=generator)
    labels = torch.randint(0, 4, (30,), generator=generator)
    got = knn_predict(bank, labels, queries, k=7, temperature=0.1)
    for i, query in enumerate(queries.tolist()):
        scored = []
        for row, label in zip(bank.tolist(), labels.tolist(), strict=True):
            dot = sum(a * b for a, b in zip(row, query, strict=True))
            scored.append((dot / math.hypot(*row) / math.hypot(*query), label))
        votes = [0.0] * 4
        for similarity, label in sorted(scored, reverse=True)[:7]:
            votes[label] += math.exp(similarity / 0.1)
        assert got[i] == votes.index(max(votes))


def test_nearest_leaves_the_query_out():
    unit = nn.functional.normalize(torch.tensor([[1.0, 0], [1, 0.1], [0, 1], [0.1, 1]])).numpy()
    assert nearest(unit, 1)[0][[0, 2], 0].tolist() == [1, 3]


def colour_set(count, seed):
    """Two classes that raw pixels separate: red and blue pictures with noise."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    images = rng.integers(0, 60, (count, 3, 8, 8))
    images[labels == 0, 0] += 150
    images[labels == 1, 2] += 150
    return ImageSet("colours", images.astype(np.uint8), labels, ("red", "blue"), image_size=8)


@pytest.mark.parametrize("name", EVALUATIONS)
def test_every_evaluation_separates_what_is_separable(name):
    train, test = colour_set(120, 0), colour_set(40, 1)
    row = EVALUATIONS[name](Pixels(8).eval(), train, test, Probe(8, CPU, k=20))
    assert row["accuracy"] == 100
    assert row["protocol"]
    swapped = replace(test, labels=1 - test.labels)
    assert EVALUATIONS[name](Pixels(8).eval(), train, swapped, Probe(8, CPU, k=20))["accuracy"] == 0


def test_the_linear_probe_is_the_authors_protocol(monkeypatch):
    """Fresh crops every epoch, lr 30 and a tenth of it at 60 and 80 % of the epochs; the fast one along a cosine."""
    views, rates = [], []

    class Noted(probes.RandomViews):
        def __init__(self, backbone, images, probe, crop_scale, shown=True):
            super().__init__(backbone, images, probe, crop_scale, shown)
            self.crop_scale = crop_scale

        def __call__(self, view):
            views.append((view, self.crop_scale))
            return super().__call__(view)

    class NotedDescent(probes.Descent):
        def __call__(self, z, labels, lr):
            rates.append(lr)
            super().__call__(z, labels, lr)

    monkeypatch.setattr(probes, "RandomViews", Noted)
    monkeypatch.setattr(probes, "Descent", NotedDescent)
    train, test = colour_set(8, 0), colour_set(4, 1)
    probes.linear(Pixels(8).eval(), train, test, Probe(8, CPU), epochs=5, batch_size=4)
    assert views == [(epoch, 0.08) for epoch in range(5)]
    assert rates == pytest.approx([30] * 6 + [3] * 2 + [0.3] * 2)
    views.clear(), rates.clear()
    probes.linear_fast(Pixels(8).eval(), train, test, Probe(8, CPU), views=2, epochs=8)
    assert views == [(0, 0.2), (1, 0.2)]
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * step / 4)) for step in range(4)])


def test_the_descent_is_that_of_sgd_with_momentum():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (probes.new_classifier(6, 3, Probe(8, CPU)) for _ in range(2))
    descent = probes.Descent(ours, weight_decay=0.1)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1)
    for step in range(4):
        z, labels = torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)
        optimizer.param_groups[0]["lr"] = lr = 1.0 / (1 + step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(z), labels).backward()
        optimizer.step()
        descent(z, labels, lr)
        torch.testing.assert_close(ours.weight.data, theirs.weight.data)
        torch.testing.assert_close(ours.bias.data, theirs.bias.data)


def test_views_differ_and_return(monkeypatch):
    """Every view is another draw, the same each time it is asked for, kept on the device or not."""
    images, probe = colour_set(24, 0), Probe(8, CPU)
    views = probes.RandomViews(Pixels(8).eval(), images, probe, 0.2)
    first, second = views(0), views(1)
    assert (first - second).abs().max() > 0.1
    monkeypatch.setattr(import_module("onecrop.evaluate.features"), "RESIDENT", 0)
    again = probes.RandomViews(Pixels(8).eval(), images, probe, 0.2)
    assert again.kept is None
    assert torch.equal(again(1), second)
    assert torch.equal(views(0), first)


def test_features_need_eval_mode_and_keep_the_last_batch(monkeypatch):
    monkeypatch.setattr(import_module("onecrop.evaluate.features"), "BATCH", 7)
    images = colour_set(24, 0)
    torch.manual_seed(0)
    backbone = build_backbone("tiny", "small")
    with pytest.raises(AssertionError, match="eval mode"):
        extract(backbone, images, Probe(8, CPU))
    features = extract(backbone.eval(), images, Probe(8, CPU))
    assert features.shape == (24, 256)
    alone = extract(backbone, images.take(np.array([23])), Probe(8, CPU))  # eval mode: no image sees another
    torch.testing.assert_close(features[23:], alone, rtol=0, atol=1e-5)


def test_a_layer_left_in_train_mode_is_noticed():
    backbone = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192)).eval()
    backbone[1].train()
    with pytest.raises(AssertionError, match="eval mode"):
        extract(backbone, colour_set(4, 0), Probe(8, CPU))
