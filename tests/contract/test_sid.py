"""The paper's method and each of its ablations."""

import pytest
import torch
import torch.nn.functional as F

from onecrop.augment import CutMix
from onecrop.losses import instance_loss
from onecrop.losses.instance import Relation
from tests.contract.test_methods import build


def test_calibration_fills_every_row_with_the_untrained_networks_feature():
    made, loader = build(calibrate=True)  # 50 images in batches of 8: the last one is incomplete
    fresh, _ = build(calibrate=False)  # same seed, same untrained network, random bank
    assert not torch.allclose(made.bank.weight, fresh.bank.weight)
    for batch, count in loader.in_order():
        z = fresh.features(fresh.augment(batch.images, batch.aspect, batch.draws))
        torch.testing.assert_close(made.bank.weight[batch.index[:count]], z[:count])


@pytest.mark.parametrize("kl", ["sqrt", "l1", "l2", "none"])
@pytest.mark.parametrize(("cutmix", "mixing"), [(0.0, "batch"), (0.5, "batch"), (0.5, "image")])
def test_terms_are_the_papers_objective(kl, cutmix, mixing):
    made, loader = build(kl=kl, cutmix=cutmix, mixing=mixing, kl_weight=3.0, temperature=0.3, kl_temperature=0.8)
    batch, before = loader.batch(0), made.bank.weight.clone()
    mixed = CutMix(cutmix, each=mixing == "image")
    x, partner, mix = mixed(made.augment(batch.images, batch.aspect, batch.draws), batch.draws)
    z = made.features(x)
    expected = instance_loss(
        z,
        before,
        batch.index,
        temperature=0.3,
        kl_temperature=0.8,
        kl=kl,
        mixed_target=None if partner is None else batch.index[partner],
        mix=mix,
    )
    terms = made(batch)
    torch.testing.assert_close(terms["cross_entropy"], expected.cross_entropy)
    assert ("sqrt_kl" in terms) == (kl != "none")
    if kl != "none":
        torch.testing.assert_close(terms["sqrt_kl"], 3.0 * expected.sqrt_kl)


@pytest.mark.parametrize(("cutmix", "mixing"), [(0.0, "batch"), (0.5, "batch"), (0.5, "image")])
def test_the_proximal_term_pulls_a_feature_to_the_rows_of_what_is_in_the_picture(cutmix, mixing):
    made, loader = build(kl="none", cutmix=cutmix, mixing=mixing, proximal_weight=7.0)
    batch, before = loader.batch(0), made.bank.weight.clone()
    mixed = CutMix(cutmix, each=mixing == "image")
    x, partner, mix = mixed(made.augment(batch.images, batch.aspect, batch.draws), batch.draws)
    z = made.features(x).detach()
    total = 0.0
    for i, share in enumerate(torch.as_tensor(mix).expand(len(z))):
        near = (z[i] - before[batch.index[i]]).square().sum()
        other = near if partner is None else (z[i] - before[batch.index[partner[i]]]).square().sum()
        total += float(share * near + (1 - share) * other)
    assert float(made(batch)["proximal"].detach()) == pytest.approx(7 * total / len(z), rel=1e-5)


@pytest.mark.parametrize("update", ["plain", "corrected"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_bank_is_read_before_it_is_written(update, momentum):
    made, loader = build(update=update, bank_momentum=momentum, cutmix=0)
    batch, before = loader.batch(0), made.bank.weight.clone()
    z = made.features(made.augment(batch.images, batch.aspect, batch.draws)).detach()
    made(batch)
    direction = z
    if update == "corrected":
        p = torch.softmax(z @ before.T / 0.2, dim=1)[:, batch.index]
        direction = z - p.T @ z
    expected = before.clone()
    expected[batch.index] = F.normalize(momentum * before[batch.index] + (1 - momentum) * direction, dim=1)
    torch.testing.assert_close(made.bank.weight, expected)


@pytest.mark.parametrize("mixing", ["batch", "image"])
def test_soft_labels_move_a_row_by_all_pictures_that_show_its_image(mixing):
    made, loader = build(update="soft", bank_momentum=0.25, mixing=mixing)
    batch, before = loader.batch(0), made.bank.weight.clone()
    mixed = CutMix(0.5, each=mixing == "image")
    x, partner, mix = mixed(made.augment(batch.images, batch.aspect, batch.draws), batch.draws)
    z = made.features(x).detach()
    made(batch)
    p = torch.softmax(z @ before.T / 0.2, dim=1)[:, batch.index]
    mix, expected = mix.expand(len(z)), before.clone()
    for i, row in enumerate(batch.index):
        j = int((partner == i).nonzero())
        direction = mix[i] * z[i] + (1 - mix[j]) * z[j] - p[:, i] @ z
        expected[row] = F.normalize(0.25 * before[row] + 0.75 * direction, dim=0)
    torch.testing.assert_close(made.bank.weight, expected)
    plain, loader = build(update="soft", cutmix=0.0)  # nothing is mixed: the corrected rule
    corrected, _ = build(update="corrected", cutmix=0.0)
    plain(loader.batch(0)), corrected(loader.batch(0))
    assert torch.equal(plain.bank.weight, corrected.bank.weight)


def test_the_banks_momentum_goes_along_the_run_and_is_saved():
    made, loader = build(bank_momentum=0.2, bank_momentum_end=0.8, cutmix=0.0, update="plain")
    assert made.state_dict()["bank_momentum"] == pytest.approx(0.2)
    for progress, m in ((0.0, 0.2), (0.5, 0.5), (1.0, 0.8)):
        made.after_step(torch.tensor(progress))
        assert made.state_dict()["bank_momentum"] == pytest.approx(m)
        batch, before = loader.batch(0), made.bank.weight.clone()
        z = made.features(made.augment(batch.images, batch.aspect, batch.draws)).detach()
        made(batch)
        moved = F.normalize(m * before[batch.index] + (1 - m) * z, dim=1)
        torch.testing.assert_close(made.bank.weight[batch.index], moved)
    assert "bank_momentum" not in build()[0].state_dict()


def test_sampled_rows_are_distinct_and_never_the_batchs_own():
    made, loader = build(sampled_rows=20)
    draws_seen = set()
    for step in range(6):
        batch = loader.batch(step)
        rows, own = made.rows(batch.index, batch.draws)
        assert rows.shape == (28, 16)
        assert torch.equal(rows[own], made.bank.weight[batch.index])
        taken = [int((made.bank.weight == row).all(1).nonzero()[0, 0]) for row in rows]
        assert len(set(taken)) == 28
        draws_seen.add(tuple(sorted(taken[8:])))
    assert len(draws_seen) == 6  # another draw every step
    everything, own = build(sampled_rows=45)[0].rows(batch.index, batch.draws)
    assert len(everything) == 50  # asked for as many as there are: all rows
    assert torch.equal(own, batch.index)


def test_sampled_cross_entropy_runs_over_the_batch_and_the_sample_alone():
    made, loader = build(sampled_rows=20, cutmix=0.0, kl="none")
    batch = loader.batch(0)
    z = made.features(made.augment(batch.images, batch.aspect, batch.draws))
    rows, _ = made.rows(batch.index, batch.draws)
    expected = F.cross_entropy(z @ rows.T / 0.2, torch.arange(8))
    torch.testing.assert_close(made(batch)["cross_entropy"], expected)


def test_collapse_shows_in_spread():
    made, loader = build()
    made(loader.batch(0))
    healthy = made.watch["spread"].item()
    with torch.no_grad():
        made.head[-1].weight.zero_()
        made.head[-1].bias.fill_(1.0)
    made(loader.batch(1))
    assert healthy > 0.2
    assert made.watch["spread"].item() == pytest.approx(0, abs=1e-5)


def test_the_relation_starts_grows_and_is_saved():
    made, _ = build(relation=0.6, relation_start=0.2, relation_rise=0.1)
    weights = []
    for progress in (0.1, 0.2, 0.25, 0.3, 1.0):
        made.after_step(torch.tensor(progress))
        weights.append(made.relation_weight.item())
    assert weights == pytest.approx([0.0, 0.0, 0.3, 0.6, 0.6])
    assert made.state_dict()["relation_weight"] == pytest.approx(0.6)
    made, _ = build(relation=0.9, relation_start=0.1, relation_rise=0.9)
    made.after_step(torch.tensor(0.4))
    assert made.relation_weight.item() == pytest.approx(0.3)


def test_the_relation_reads_the_bank_before_it_is_written():
    made, loader = build(relation=0.6, cutmix=0, kl="none")
    made.after_step(torch.tensor(1.0))
    batch, before = loader.batch(0), made.bank.weight.clone()
    z = made.features(made.augment(batch.images, batch.aspect, batch.draws))
    relation = Relation(0.6, 0.1)
    expected = instance_loss(z, before, batch.index, temperature=0.2, kl_temperature=1.0, kl="none", relation=relation)
    plain = instance_loss(z, before, batch.index, temperature=0.2, kl_temperature=1.0, kl="none")
    got = made(batch)["cross_entropy"]
    torch.testing.assert_close(got, expected.cross_entropy)
    assert (got - plain.cross_entropy).abs() > 1e-3
