"""The losses against plain float64 loops of the paper's equations."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from onecrop.losses import instance, instance_cross_entropy, instance_loss, sqrt_kl
from onecrop.losses.instance import Relation

B, N, D, T, T_KL = 5, 23, 7, 0.2, 0.7
TARGET = torch.tensor([3, 0, 22, 7, 11])


def unit(*shape, seed):
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=1, keepdim=True)


@pytest.fixture
def z():
    return unit(B, D, seed=1).requires_grad_()


@pytest.fixture
def rows():
    return unit(N, D, seed=2)


def softmax(logits):
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def kl_parts(q):
    """(Σ π log π, −Σ π log u) with u ∝ √π, by the definition."""
    pi = softmax(q)
    roots = [math.sqrt(p) for p in pi]
    u = [r / sum(roots) for r in roots]
    return sum(p * math.log(p) for p in pi), -sum(p * math.log(v) for p, v in zip(pi, u, strict=True))


def loop(z, rows, target, mixed, mix, left_out=(), t_kl=T_KL):
    """Both losses, accuracy, p and dz of both, image by image, with Python floats."""
    ce, kl, hits, p_all, dz_ce, dz_kl = 0.0, [0.0, 0.0], 0, [], [], []
    for i in range(len(z)):
        keep = [k for k in range(len(rows)) if (i, k) not in left_out]
        c = {k: sum(a * b for a, b in zip(rows[k], z[i], strict=True)) for k in keep}
        p = dict(zip(keep, softmax([c[k] / T for k in keep]), strict=True))
        q = {k: c[k] / t_kl for k in keep}
        pi = dict(zip(keep, softmax([q[k] for k in keep]), strict=True))
        a, b, mu = target[i], mixed[i], mix[i]
        ce += -(mu * math.log(p[a]) + (1 - mu) * math.log(p[b])) / len(z)
        parts = kl_parts([q[k] for k in keep])
        kl = [x + y / len(z) for x, y in zip(kl, parts, strict=True)]
        hits += max(c, key=c.get) == a
        p_all.append([p.get(k, 0.0) for k in target])
        y = {k: mu * (k == a) + (1 - mu) * (k == b) for k in keep}
        mean = sum(pi[k] * q[k] for k in keep)
        dz_ce.append([sum((p[k] - y[k]) / T * rows[k][d] for k in keep) / len(z) for d in range(D)])
        dz_kl.append([sum(0.5 * pi[k] * (q[k] - mean) / t_kl * rows[k][d] for k in keep) / len(z) for d in range(D)])
    tensor = lambda x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    return ce, kl, hits / len(z), tensor(p_all), tensor(dz_ce), tensor(dz_kl)


def run(z, rows, t_kl=T_KL, **more):
    return instance_loss(z, rows, TARGET, temperature=T, kl_temperature=t_kl, **more)


# Of temperatures in a whole ratio one exponential is a power of the other: 5 is the default's, 6 has other digits.
ratios = pytest.mark.parametrize("t_kl", [T_KL, 5 * T, 6 * T], ids=["3.5", "5", "6"])


# All at once; in blocks with a last short one, whose cosines are kept or computed again; one row at a time.
@pytest.fixture(params=[(None, None), (None, 8 * B), (0, 8 * B), (0, B)], ids=["dense", "kept", "blocks", "row by row"])
def block(request, monkeypatch):
    dense, cached = request.param
    if dense is not None:
        monkeypatch.setattr(instance, "DENSE_ELEMENTS", dense)
    if cached is not None:
        monkeypatch.setattr(instance, "CACHED_ELEMENTS", cached)


@ratios
@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("mixed", [False, True], ids=["plain", "cutmix"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_instance_loss_equals_the_loop(z, rows, mixed, masked, t_kl):
    partner = TARGET.roll(1) if mixed else None
    mix = torch.tensor([0.9, 0.5, 0.75, 0.6, 1.0], dtype=torch.float64) if mixed else 1.0
    left_out = {(0, 1), (0, 2), (1, 22), (4, 3)} if masked else set()
    mask = None
    if masked:
        mask = torch.zeros(B, N, dtype=torch.bool)
        for i, k in left_out:
            mask[i, k] = True
        partner = TARGET.clone() if mixed else None  # a partner's row may not be masked
    out = run(z, rows, t_kl, mixed_target=partner, mix=mix, mask=mask)
    weights = mix.tolist() if mixed else [1.0] * B
    other = (TARGET if partner is None else partner).tolist()
    found = loop(z.tolist(), rows.tolist(), TARGET.tolist(), other, weights, left_out, t_kl)
    ce, kl, accuracy, p, dz_ce, dz_kl = found
    assert out.cross_entropy.item() == pytest.approx(ce, abs=1e-12)
    assert out.sqrt_kl.item() == pytest.approx(sum(kl), abs=1e-12)
    assert out.accuracy.item() == pytest.approx(accuracy)
    torch.testing.assert_close(out.batch_probabilities, p, rtol=0, atol=1e-12)
    (got_ce,) = torch.autograd.grad(out.cross_entropy, z, retain_graph=True)
    (got_kl,) = torch.autograd.grad(out.sqrt_kl, z)
    torch.testing.assert_close(got_ce, dz_ce, rtol=0, atol=1e-12)
    torch.testing.assert_close(got_kl, dz_kl, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_relation_equals_the_loop(z, rows, masked):
    """The target is (1 − a)·(mixed own rows) + a·softmax over k ≠ i of w_i·w_k / T_rel, duplicates left out."""
    a, t_rel, mix = 0.3, 0.1, [0.9, 0.5, 0.75, 0.6, 1.0]
    partner = TARGET.roll(1)
    left_out = {(0, 1), (0, 2), (1, 21), (4, 4)} if masked else set()
    mask = torch.zeros(B, N, dtype=torch.bool)
    for i, k in left_out:
        mask[i, k] = True
    value, gradient = 0.0, []
    for i in range(B):
        keep = [k for k in range(N) if (i, k) not in left_out]
        p = dict(zip(keep, softmax([float(rows[k] @ z[i].detach()) / T for k in keep]), strict=True))
        others = [k for k in keep if k != TARGET[i]]
        r = dict(zip(others, softmax([float(rows[TARGET[i]] @ rows[k]) / t_rel for k in others]), strict=True))
        y = {k: a * r.get(k, 0.0) for k in keep}
        y[int(TARGET[i])] += (1 - a) * mix[i]
        y[int(partner[i])] += (1 - a) * (1 - mix[i])
        value -= sum(y[k] * math.log(p[k]) for k in keep) / B
        gradient.append(sum((p[k] - y[k]) / T * rows[k] for k in keep) / B)
    out = run(
        z,
        rows,
        mixed_target=partner,
        mix=torch.tensor(mix, dtype=torch.float64),
        mask=mask if masked else None,
        relation=Relation(torch.tensor(a, dtype=torch.float64), t_rel),
    )
    assert out.cross_entropy.item() == pytest.approx(value, abs=1e-12)
    (got,) = torch.autograd.grad(out.cross_entropy, z)
    torch.testing.assert_close(got, torch.stack(gradient), rtol=0, atol=1e-12)


@ratios
@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("kl", ["sqrt", "l1", "l2", "none"])
def test_known_kl_weight_gives_the_gradient_of_the_sum(z, rows, kl, t_kl):
    apart, joint = run(z, rows, t_kl, kl=kl), run(z, rows, t_kl, kl=kl, kl_weight=7.0)
    (expected,) = torch.autograd.grad(apart.cross_entropy + 7.0 * apart.sqrt_kl, z)
    total = joint.cross_entropy + 7.0 * joint.sqrt_kl
    torch.testing.assert_close(total.detach(), (apart.cross_entropy + 7.0 * apart.sqrt_kl).detach())
    (got,) = torch.autograd.grad(total, z)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("block")
def test_a_block_that_is_wholly_masked_changes_nothing(z, rows):
    mask = torch.zeros(N, dtype=torch.bool)
    mask[[1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 15]] = True  # never a target; covers whole blocks of one row
    kept = (~mask).nonzero()[:, 0]
    new_place = torch.cumsum(~mask, 0) - 1
    out = run(z, rows, mask=mask)
    same = instance_loss(z, rows[kept], new_place[TARGET], temperature=T, kl_temperature=T_KL)
    for a, b in zip(out, same, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("t", "t_kl"), [(0.004, 0.02), (0.004, 0.015), (0.004, 1.0)])
def test_the_lowest_temperatures_stay_finite_in_float32(z, rows, t, t_kl):
    """Logits of 250 and rows that are all far away."""
    away = rows - 2 * z.detach()[0]
    away = away / away.norm(dim=1, keepdim=True)
    pushes = []
    for dtype in (torch.float64, torch.float32):
        x = z.detach().to(dtype).requires_grad_()
        out = instance_loss(x, away.to(dtype), TARGET, temperature=t, kl_temperature=t_kl, kl_weight=2.0)
        pushes.append(torch.autograd.grad(out.cross_entropy + 2.0 * out.sqrt_kl, x)[0].double())
    assert pushes[1].isfinite().all()
    torch.testing.assert_close(pushes[1], pushes[0], rtol=1e-3, atol=1e-3 * float(pushes[0].abs().max()))


def test_the_parts_of_sqrt_kl(z, rows):
    """L1 + L2 = SqrtKL; λ·SqrtKL pushes as (λ/2)·L1 and as −λ·L2 do."""
    l1_value, l2_value = 0.0, 0.0
    for row in (z @ rows.T / T_KL).tolist():
        l1, l2 = kl_parts(row)
        l1_value, l2_value = l1_value + l1 / B, l2_value + l2 / B
    value, push = {}, {}
    for kl in ("sqrt", "l1", "l2"):
        out = run(z, rows, kl=kl)
        value[kl] = out.sqrt_kl.item()
        (push[kl],) = torch.autograd.grad(out.sqrt_kl, z)
    assert value["l1"] == pytest.approx(l1_value, abs=1e-12)
    assert value["l2"] == pytest.approx(l2_value, abs=1e-12)
    assert value["sqrt"] == pytest.approx(l1_value + l2_value, abs=1e-12)
    torch.testing.assert_close(push["sqrt"], push["l1"] / 2)
    torch.testing.assert_close(push["sqrt"], -push["l2"])


def test_kl_none_costs_nothing(z, rows):
    out = run(z, rows, kl="none")
    assert out.sqrt_kl.item() == 0
    assert not out.sqrt_kl.requires_grad
    with pytest.raises(ValueError, match="sqrt, l1, l2, none"):
        run(z, rows, kl="sqrtt")


def test_cross_entropy_by_finite_differences(z, rows):
    assert gradcheck(lambda x: run(x, rows, mixed_target=TARGET.roll(1), mix=0.7).cross_entropy, z)


def test_sqrt_kl_by_finite_differences_with_u_fixed():
    logits = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    u = torch.softmax(logits.detach() / 2, -1)
    assert gradcheck(lambda x: sqrt_kl(x, u), logits)
    torch.testing.assert_close(sqrt_kl(logits, u), sqrt_kl(logits))
    # and where u is worked out, the gradient is that of a constant u: ½·π(q − E)
    (push,) = torch.autograd.grad(sqrt_kl(logits).sum(), logits)
    pi = torch.softmax(logits, -1)
    mean = (pi * logits).sum(-1, keepdim=True)
    torch.testing.assert_close(push, 0.5 * pi * (logits - mean))


def test_the_papers_example():
    """N = 10, π = (.91, .01 × 9): u = (.5145, .0539 × 9), ∂CE/∂w_j = .01·z, ∂SqrtKL/∂w_j ≈ −.0205·z."""
    pi = torch.tensor([0.91] + [0.01] * 9, dtype=torch.float64)
    u = torch.softmax(pi.log() / 2, 0)
    assert u[0].item() == pytest.approx(0.5145, abs=1e-4)
    assert u[1].item() == pytest.approx(0.0539, abs=1e-4)
    logits = pi.log()[None].requires_grad_()
    value = sqrt_kl(logits)
    assert value.item() == pytest.approx((pi * (pi / u).log()).sum().item(), abs=1e-12)
    (push,) = torch.autograd.grad(value.sum(), logits)
    assert push[0, 1].item() == pytest.approx(-0.0205, abs=1e-4)
    (push,) = torch.autograd.grad(instance_cross_entropy(logits, torch.tensor([0])).sum(), logits)
    assert push[0, 1].item() == pytest.approx(0.01, abs=1e-12)


def test_limits_uniform_and_one_hot():
    uniform, sharp = torch.zeros(1, 50, dtype=torch.float64), torch.zeros(1, 50, dtype=torch.float64)
    sharp[0, 4] = 1000
    assert sqrt_kl(uniform).item() == pytest.approx(0, abs=1e-12)
    assert sqrt_kl(sharp).item() == pytest.approx(0, abs=1e-12)
    target = torch.tensor([4])
    assert instance_cross_entropy(uniform, target).item() == pytest.approx(math.log(50))
    assert instance_cross_entropy(sharp, target).item() == pytest.approx(0, abs=1e-12)


def test_order_of_the_bank_does_not_matter(z, rows):
    order = torch.randperm(N, generator=torch.Generator().manual_seed(5))
    place = order.argsort()
    a, b = run(z, rows), instance_loss(z, rows[order], place[TARGET], temperature=T, kl_temperature=T_KL)
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_no_gradient_into_constant_sides(z, rows):
    rows = rows.requires_grad_()
    out = run(z, rows)
    assert not out.accuracy.requires_grad
    assert not out.batch_probabilities.requires_grad
    (out.cross_entropy + out.sqrt_kl).backward()
    assert rows.grad is None


def test_the_bank_may_be_written_before_backward(z, rows):
    (expected,) = torch.autograd.grad(run(z, rows).cross_entropy, z)
    written = rows.clone()
    out = run(z, written)
    written.fill_(float("nan"))
    (got,) = torch.autograd.grad(out.cross_entropy, z)
    assert torch.equal(got, expected)


def test_nothing_of_size_batch_times_bank_is_kept(rows):
    """Only dz stays for the backward pass."""
    kept = []
    z = unit(B, D, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        run(z, rows)
    assert kept
    assert max(kept) <= B * D
