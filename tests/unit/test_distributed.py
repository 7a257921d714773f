"""What a group of processes is made of, without a second process; with them: tests/distributed."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from onecrop import bank
from onecrop.bank import MemoryBank, own_rows
from onecrop.data import ImageSet, Loader
from onecrop.distributed import ALONE, Group, joined, world
from onecrop.distributed.join import TOGETHER, Watch
from onecrop.errors import UserError
from onecrop.nets import BACKBONES, build_backbone
from onecrop.nets.depth import Depth, share_depth
from onecrop.nets.norms import GroupedNorm, SharedNorm, norm_in_groups, share_norms

CPU = torch.device("cpu")


def images(count):
    pixels = np.random.default_rng(0).integers(0, 255, (count, 3, 8, 8), np.uint8)
    return ImageSet("noise", pixels, aspect=np.linspace(0.5, 2, count, dtype=np.float32))


@pytest.mark.parametrize(("count", "size"), [(7, 3), (6, 3), (2, 3), (100, 1), (0, 2)])
def test_parts_are_contiguous_even_and_complete(count, size):
    parts = [Group(rank, size).part(count) for rank in range(size)]
    assert [i for part in parts for i in range(count)[part]] == list(range(count))
    lengths = [part.stop - part.start for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert parts == [Group(0, size).part(count, rank) for rank in range(size)]


def test_a_process_by_itself_adds_no_operation():
    x = torch.randn(4, 3, requires_grad=True)
    assert world() == ALONE
    for result in (ALONE.gather(x, 4), ALONE.fan_out(x), ALONE.total(x), ALONE.sum(x), ALONE.concatenate(x)):
        assert result is x
    index = torch.tensor([2, 0])
    assert ALONE.place(index, 4) is index
    assert ALONE.any(True, False) == [True, False]
    assert ALONE.said_by(0, {1: 2}) == {1: 2}
    with joined() as group:
        assert group == ALONE


def test_a_missing_process_is_named_with_what_to_do():
    """A run goes on from its checkpoint; an evaluation has none."""
    said = {verb: Watch(HashStore(), Group(0, 3), remedy).gone(2) for verb, remedy in TOGETHER.items()}
    assert all(sentence.startswith("rank 2 of 3 is gone (") for sentence in said.values())
    assert "--resume" in said["pretrain"]
    assert "--resume" not in said["evaluate"]


def test_each_row_has_one_owner():
    index = torch.arange(11)
    places = torch.stack([Group(rank, 4).place(index, 11) for rank in range(4)])
    assert ((places >= 0).sum(0) == 1).all()
    for rank in range(4):
        part = Group(rank, 4).part(11)
        assert places[rank][part].tolist() == list(range(part.stop - part.start))


@pytest.mark.parametrize("num_images", [3, 4, 5, 8, 9, 15])
def test_rows_drawn_piece_by_piece_are_those_drawn_at_once(monkeypatch, num_images):
    """Normal numbers come in blocks of sixteen from the generator: pieces must not cut them."""
    monkeypatch.setattr(bank, "DRAWN_ROWS", 4)
    torch.manual_seed(3)
    whole, after = torch.randn(num_images, 8), torch.rand(2)
    parts = []
    for rank in range(3):
        torch.manual_seed(3)
        parts.append(own_rows(lambda count: torch.randn(count, 8), num_images, Group(rank, 3)))
        assert torch.equal(torch.rand(2), after)
    assert torch.equal(torch.cat(parts), whole)


def test_a_bank_in_parts_is_written_by_the_owners():
    index, z = torch.tensor([6, 0, 3]), torch.eye(3)
    whole = MemoryBank(7, 3, momentum=0.5)
    start = whole.weight.clone()
    parts = []
    for rank in range(3):
        part = MemoryBank(7, 3, momentum=0.5, group=Group(rank, 3))
        part.weight.copy_(start[Group(rank, 3).part(7)])
        part.update(index, z, torch.full((3, 3), 0.2))
        part.write(torch.tensor([1, 5]), z[:2])
        parts.append(part.weight)
    whole.update(index, z, torch.full((3, 3), 0.2))
    whole.write(torch.tensor([1, 5]), z[:2])
    torch.testing.assert_close(torch.cat(parts), whole.weight)


def test_loaders_of_several_processes_make_up_one():
    whole = Loader(images(10), 7, CPU, seed=3)
    loaders = [Loader(images(10), 7, CPU, 3, Group(rank, 3)) for rank in range(3)]
    assert [loader.part_size for loader in loaders] == [3, 2, 2]
    pairs = [(whole.batch(step), [loader.batch(step) for loader in loaders]) for step in (0, 2)]
    ordered = [list(loader.in_order()) for loader in loaders]
    pairs += [(batch, [other[n][0] for other in ordered]) for n, (batch, _) in enumerate(whole.in_order())]
    for batch, parts in pairs:
        assert all(torch.equal(part.index, batch.index) for part in parts)
        assert torch.equal(torch.cat([part.images for part in parts]), batch.images)
        assert torch.equal(torch.cat([part.aspect for part in parts]), batch.aspect)
        drawn = torch.cat([part.draws.uniform("crop", 4) for part in parts])
        assert torch.equal(drawn, batch.draws.uniform("crop", 4))
        assert torch.equal(parts[1].draws.whole().uniform("crop", 4), drawn)


def test_a_batch_smaller_than_the_group_is_refused():
    with pytest.raises(UserError, match="a batch of 2 leaves some of 3 processes without an image"):
        Loader(images(10), 2, CPU, 0, Group(0, 3))


def net():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.BatchNorm1d(64, affine=False))
    nn.init.uniform_(layers[1].weight, 0.5, 2)
    return layers.double()


def test_a_shared_norm_is_batch_norm():
    plain, shared = net(), net()
    share_norms(shared, ALONE, 6, CPU)
    assert sum(isinstance(m, SharedNorm) for m in shared.modules()) == 2
    assert shared.state_dict().keys() == plain.state_dict().keys()
    x, weight = torch.randn(6, 3, 6, 6, dtype=torch.float64), torch.randn(6, 64, dtype=torch.float64)
    for layers in (plain, shared):
        for _ in range(2):
            (layers(x) * weight).sum().backward()
    for (name, a), b in zip(plain.named_parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=lambda m, n=name: f"{n}: {m}")
    for a, b in zip(plain.buffers(), shared.buffers(), strict=True):
        torch.testing.assert_close(b, a)
    torch.testing.assert_close(shared.eval()(x), plain.eval()(x))


def test_a_norm_of_another_make_is_refused():
    class Fused(nn.BatchNorm2d):
        """With an activation in it, as timm has them."""

    with pytest.raises(UserError, match="Fused cannot be shared between processes: pass --sync-batch-norm false"):
        share_norms(nn.Sequential(nn.Conv2d(3, 4, 3), Fused(4)), Group(0, 2), 8, CPU)


def test_groups_of_vectors_need_parts_of_one_length():
    """Three processes with 4, 3 and 3 images would take 2, 1 and 1 steps through the norm, and never meet."""
    for batch_size, groups in ((10, 1), (12, 8)):
        share_norms(norm_in_groups(nn.Sequential(nn.BatchNorm1d(4)), groups), Group(0, 3), batch_size, CPU)
    with pytest.raises(UserError, match="take a multiple of 3 for --batch-size 10, or pass --norm-groups 1"):
        share_norms(norm_in_groups(nn.Sequential(nn.BatchNorm1d(4)), 8), Group(0, 3), 10, CPU)


def test_groups_of_keys_lie_within_a_process_where_they_can():
    """Then no statistics travel: the part goes through as it would alone."""
    grouped = norm_in_groups(net(), 2)
    part = copy.deepcopy(grouped)
    share_norms(part[:2], Group(1, 2), 8, CPU)
    assert isinstance(part[1], GroupedNorm)
    x = torch.randn(8, 3, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(part[:2](x[4:]), grouped[:2](x)[4:])


def test_depth_is_torchvisions_bit_for_bit():
    from torchvision.ops import StochasticDepth

    x, weight = torch.randn(2, 8, 3, 2, 2)
    results = []
    for layer in (StochasticDepth(0.3, "row"), Depth(0.3)):
        given = x.clone().requires_grad_()
        torch.manual_seed(5)
        out = layer(given)
        (out * weight).sum().backward()
        results.append((out, given.grad, torch.rand(1)))
        assert layer.eval()(x) is x
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (results[0][0] == 0).flatten(1).all(1).any()


def test_processes_drop_the_images_that_one_would_drop():
    """Of two views in one pass, too."""
    layer, kept = Depth(0.5), []
    views = torch.ones(2, 7)
    torch.manual_seed(1)
    whole = layer(views.flatten()).view(2, 7)
    for rank in range(3):
        assert share_depth(nn.Sequential(layer), Group(rank, 3), 7)
        torch.manual_seed(1)
        kept.append(layer(views[:, Group(rank, 3).part(7)].flatten()).view(2, -1))
    assert torch.equal(torch.cat(kept, 1), whole)
    assert not share_depth(net(), Group(1, 3), 7)


@pytest.mark.parametrize("name", BACKBONES)
def test_named_networks_draw_by_depth_alone(name):
    """Another layer that draws would draw alike for other images on every process."""
    made = build_backbone(name, "small", 32)
    assert sum(isinstance(layer, Depth) for layer in made.modules()) == (16 if name == "efficientnet_b0" else 0)
    kinds = {type(layer).__name__ for layer in made.modules()}
    assert not [kind for kind in kinds if "Stochastic" in kind or "Drop" in kind]


def test_depth_compiles_as_one_graph():
    compiled = torch.compile(Depth(0.5), backend="aot_eager", fullgraph=True)
    torch.manual_seed(2)
    assert compiled(torch.ones(64)).unique().tolist() == [0, 2]
