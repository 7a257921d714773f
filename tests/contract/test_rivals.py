"""The other methods' terms are the equations of their papers, of their own features: the losses are tested by loops."""

import pytest
import torch
import torch.nn.functional as F

from onecrop.losses.contrastive import info_nce, noise_contrastive, nt_xent, patch_clustering
from onecrop.methods.base import Settings, augmentation
from onecrop.methods.jigclu import cut, stitch
from onecrop.nets.backbones import feature_map
from tests.contract.test_methods import build


def views(made, batch, *names):
    return [made.augment(batch.images, batch.aspect, batch.draws, name) for name in names]


def cosines(a, b):
    return F.cosine_similarity(a, b, dim=1)


def test_simclr_finds_partners_among_the_views_of_the_batch():
    made, loader = build("simclr", temperature=0.4)
    batch = loader.batch(0)
    z = F.normalize(made.head(made.backbone(torch.cat(views(made, batch, "first", "second")))), dim=1)
    torch.testing.assert_close(made(batch)["nt_xent"], nt_xent(z[:8], z[8:], 0.4))


def test_moco_finds_the_key_of_the_same_image():
    """Keys go through the key network in another order, and come back in that of the queries."""
    made, loader = build("moco", temperature=0.4)
    for p in made.key_backbone.parameters():
        torch.nn.init.normal_(p, std=0.1)  # another network than the queries'
    batch, queue = loader.batch(0), made.queue.rows.clone()
    first, second = views(made, batch, "query", "key")
    order = batch.draws.uniform("shuffle", 1)[:, 0].argsort()
    key = torch.empty(8, 16)
    key[order] = made.key_head(made.key_backbone(second[order])).detach()
    query = F.normalize(made.head(made.backbone(first)), dim=1)
    expected = info_nce(query, F.normalize(key, dim=1), queue, 0.4)
    torch.testing.assert_close(made(batch)["info_nce"], expected)


def test_simsiam_predicts_the_other_view():
    made, loader = build("simsiam")
    batch = loader.batch(0)
    z1, z2 = (made.projector(made.backbone(x)) for x in views(made, batch, "first", "second"))
    expected = -(cosines(made.predictor(z1), z2).mean() + cosines(made.predictor(z2), z1).mean()) / 2
    torch.testing.assert_close(made(batch)["negative_cosine"], expected)


def test_byol_predicts_the_average_networks_other_view():
    made, loader = build("byol")
    for p in made.target_backbone.parameters():
        torch.nn.init.normal_(p, std=0.1)
    batch = loader.batch(0)
    first, second = views(made, batch, "first", "second")
    p1, p2 = (made.predictor(made.projector(made.backbone(x))) for x in (first, second))
    z1, z2 = (made.target_projector(made.target_backbone(x)) for x in (first, second))
    expected = (2 - 2 * cosines(p1, z2)).mean() + (2 - 2 * cosines(p2, z1)).mean()
    torch.testing.assert_close(made(batch)["distance"], expected)


@pytest.mark.parametrize("objective", ["nce", "softmax"])
def test_npid_reads_the_bank_it_had_and_keeps_its_first_normaliser(objective):
    made, loader = build("npid", objective=objective, temperature=0.5, proximal_weight=3.0)
    normaliser = None
    for step in range(2):
        batch, bank = loader.batch(step), made.bank.weight.clone()
        z = F.normalize(made.head(made.backbone(*views(made, batch, "view"))), dim=1)
        terms = made(batch)
        distances = torch.stack([(z[i] - bank[row]).square().sum() for i, row in enumerate(batch.index)])
        torch.testing.assert_close(terms["proximal"], 3.0 * distances.mean())
        if objective == "softmax":
            torch.testing.assert_close(terms["cross_entropy"], F.cross_entropy(z @ bank.T / 0.5, batch.index))
            continue
        drawn = bank[(batch.draws.uniform("noise", 20) * 50).long()]  # [8, 20, D]
        negatives = (torch.einsum("bd,bmd->bm", z, drawn) / 0.5).exp()
        normaliser = 50 * negatives.mean().detach() if normaliser is None else normaliser
        positive = ((z * bank[batch.index]).sum(1) / 0.5).exp()
        torch.testing.assert_close(terms["nce"], noise_contrastive(positive, negatives, normaliser, 50))


def test_jigclu_knows_whose_patch_lies_where():
    made, loader = build("jigclu", temperature=0.4, location_weight=2.0)
    batch = loader.batch(0)
    patches = made.patches(batch)
    names = [(corner, image) for corner in range(4) for image in range(8)]  # of the patches, as they come
    order = batch.draws.once("jigsaw", 32).argsort()
    corner, image = (torch.tensor([names[place][part] for place in order]) for part in range(2))
    quarters = cut(F.adaptive_avg_pool2d(feature_map(made.backbone, stitch(patches[order])), 2))
    terms = made(batch)
    z = F.normalize(made.head(quarters), dim=1)
    torch.testing.assert_close(terms["clustering"], patch_clustering(z, image, 0.4))
    torch.testing.assert_close(terms["location"], 2.0 * F.cross_entropy(made.locate(quarters), corner))


def test_settings_reach_the_augmentation():
    settings = Settings(0.3, 0.5, 0.6, 0.1, 0.7)
    for size, blur in ((64, 0.0), (224, 0.7)):  # small pictures are never blurred
        made = augmentation(settings, size)
        assert (made.size, made.scale, made.jitter, made.jitter_probability) == (size, (0.3, 1.0), 0.5, 0.6)
        assert (made.grey_probability, made.blur_probability) == (0.1, blur)
    assert made.reach == 11  # a kernel of 23 px, a tenth of 224
