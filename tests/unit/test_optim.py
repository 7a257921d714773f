import copy
import math

import pytest
import torch
from torch import nn

from onecrop import muon
from onecrop.bank import Table
from onecrop.muon import QUINTICS, Muon, orthogonalise
from onecrop.optim import (
    OPTIMIZERS,
    Lars,
    cosine,
    hold_learning_rate,
    optimizer_tensors,
    restore_optimizer,
    set_learning_rate,
)


def reference_orthogonalise(g):
    """The quintics one after another, one matrix at a time, by its singular value decomposition."""
    u, values, v = torch.linalg.svd(g, full_matrices=False)
    values = values / values.pow(8).sum() ** (1 / 8)
    for a, b, c in QUINTICS:
        values = a * values + b * values**3 + c * values**5
    return u @ torch.diag(values) @ v


def test_the_quintics_do_what_they_promise():
    x = torch.linspace(0.02, 1, 10_000, dtype=torch.float64)
    for a, b, c in QUINTICS:
        x = a * x + b * x**3 + c * x**5
    assert x.min() > 0.89
    assert x.max() < 1.1


@pytest.mark.parametrize("shape", [(5, 8), (6, 6)])
def test_orthogonalise_brings_singular_values_near_one(shape):
    u, _, v = torch.linalg.svd(torch.randn(3, *shape, dtype=torch.float64), full_matrices=False)
    g = u @ torch.diag(torch.logspace(0, -1.5, shape[0], dtype=torch.float64)) @ v
    out = orthogonalise(g)
    for i in range(3):
        torch.testing.assert_close(out[i], reference_orthogonalise(g[i]), rtol=0, atol=1e-6)
        u, _, v = torch.linalg.svd(g[i], full_matrices=False)
        values = torch.diagonal(u.T @ out[i] @ v.T)  # same singular vectors
        assert values.min() > 0.9
        assert values.max() < 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_zeros_stays_zeros_and_a_small_one_counts(dtype):
    """Layers before a norm whose weight begins at zero, as in the residual networks of timm, get one at first."""
    rows = torch.eye(4, 6, dtype=dtype)
    out = orthogonalise(torch.stack([torch.zeros_like(rows), 1e-7 * rows, rows]))
    assert torch.equal(out[0], torch.zeros_like(rows))
    torch.testing.assert_close(out[1], out[2], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("padded", [False, True])
def test_muon_equals_a_float64_reference(monkeypatch, padded):
    """Matrices, kernels flattened to [out, in·k·k]; vectors by SGD; tables by SGD without decay; three steps."""
    batches = muon._batches
    monkeypatch.setattr(muon, "_batches", lambda params, **_: batches(params, padded))  # as on a GPU, or on a CPU
    torch.manual_seed(0)
    shapes = [(6, 4), (6, 4), (8, 3, 3, 3), (5,), (130, 140), (140, 3), (300, 129)]
    assert len(batches([torch.empty(s) for s in shapes if len(s) > 1], padded)) == (2 if padded else 5)
    params = [nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in shapes]
    params.append(nn.Parameter(torch.randn(16, 8, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last)))
    params.append(Table(torch.randn(9, 4, dtype=torch.float64)))
    expected = [p.detach().clone() for p in params]
    velocity = [torch.zeros_like(p) for p in expected]
    lr, mu, wd = 0.02, 0.9, 0.05
    optimizer = Muon(params, torch.tensor(lr, dtype=torch.float64), mu, wd)
    for step in range(3):
        lr_now = lr * cosine(step, 3)
        set_learning_rate(optimizer, lr_now)
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, dtype=torch.float64)
            velocity[i] = mu * velocity[i] + p.grad
            update = p.grad + mu * velocity[i]
            if p.ndim >= 2 and not isinstance(p, Table):
                flat = update.reshape(len(update), -1)
                rows, columns = flat.shape
                update = (reference_orthogonalise(flat) * math.sqrt(max(1, rows / columns))).reshape(p.shape)
            if not isinstance(p, Table):
                expected[i] = expected[i] * (1 - lr_now * wd)
            expected[i] = expected[i] - lr_now * update
        optimizer.step()
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), e, rtol=0, atol=1e-6)


def test_newton_schulz_works_in_bfloat16_where_that_is_the_faster_format(monkeypatch):
    formats = []
    honest = muon.orthogonalise
    monkeypatch.setattr(muon, "orthogonalise", lambda x: formats.append(x.dtype) or honest(x))
    for able in (True, False):
        monkeypatch.setattr(muon, "multiplies_bfloat16", lambda device, able=able: able)
        for dtype in (torch.float32, torch.float64):
            p = nn.Parameter(torch.eye(4, dtype=dtype))
            p.grad = torch.eye(4, dtype=dtype)
            Muon([p], torch.tensor(0.1), 0.9, 0.0).step()
            assert p.dtype == dtype
    assert formats == [torch.bfloat16, torch.float64, torch.float32, torch.float64]


def test_sgd_is_the_textbooks():
    p = nn.Parameter(torch.tensor([2.0, -1.0]))
    optimizer = OPTIMIZERS["sgd"].build([p], torch.tensor(0.5), 0.9, 0.1)
    w, v = torch.tensor([2.0, -1.0]), torch.zeros(2)
    for grad in (torch.tensor([1.0, 0.5]), torch.tensor([-2.0, 0.25])):
        p.grad = grad.clone()
        optimizer.step()
        v = 0.9 * v + grad + 0.1 * w
        w = w - 0.5 * v
    torch.testing.assert_close(p.detach(), w)


def test_lars_scales_matrices_and_leaves_vectors():
    torch.manual_seed(0)
    matrix, vector = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5))
    optimizer = Lars([matrix, vector], torch.tensor(0.5), 0.9, 0.1)
    w, v, wv, vv = matrix.detach().clone(), torch.zeros(4, 3), vector.detach().clone(), torch.zeros(5)
    for _ in range(3):
        matrix.grad, vector.grad = torch.randn(4, 3), torch.randn(5)
        ratio = 1e-3 * w.norm() / (matrix.grad.norm() + 0.1 * w.norm())
        v = 0.9 * v + ratio * (matrix.grad + 0.1 * w)
        vv = 0.9 * vv + vector.grad
        w, wv = w - 0.5 * v, wv - 0.5 * vv
        optimizer.step()
    torch.testing.assert_close(matrix.detach(), w)
    torch.testing.assert_close(vector.detach(), wv)
    matrix.data.zero_()
    optimizer.step()
    assert matrix.isfinite().all()


def test_adamw_is_the_textbooks():
    p = nn.Parameter(torch.tensor([[2.0, -1.0]]))
    optimizer = OPTIMIZERS["adamw"].build([p], torch.tensor(0.1), 0.9, 0.2)
    w, m, v = p.detach().clone(), torch.zeros(1, 2), torch.zeros(1, 2)
    for t, grad in enumerate((torch.tensor([[1.0, 0.5]]), torch.tensor([[-2.0, 0.25]])), 1):
        p.grad = grad.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        w = w * (1 - 0.1 * 0.2) - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    torch.testing.assert_close(p.detach(), w)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_survives_saving(name, momentum):
    """That of SGD without momentum too, which has none, and beside a weight that nothing uses."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)) for _ in range(2)]
    nets[0].to(memory_format=torch.channels_last)
    nets[1].to(memory_format=torch.channels_last).load_state_dict(nets[0].state_dict())
    for net in nets:
        net.register_parameter("spare", nn.Parameter(torch.ones(3)))
    first, second = (OPTIMIZERS[name].build(n.parameters(), torch.tensor(0.1), momentum, 0.01) for n in nets)

    def step(net, optimizer, seed):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(nets[0], first, 1)
    nets[1].load_state_dict(nets[0].state_dict())
    restore_optimizer(second, nets[1], {k: v.clone() for k, v in optimizer_tensors(first, nets[0]).items()})
    for net, optimizer in zip(nets, (first, second), strict=True):
        step(net, optimizer, 2)
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_of_other_parameters_is_refused():
    net = nn.Linear(2, 2)
    optimizer = OPTIMIZERS["sgd"].build(net.parameters(), torch.tensor(0.1), 0.9, 0.0)
    with pytest.raises(KeyError, match=r"other parameters: 0\.weight"):
        restore_optimizer(optimizer, net, {"0.weight/momentum_buffer": torch.zeros(2, 2)})
    with pytest.raises(KeyError, match=r"has shape \(3, 2\)"):
        restore_optimizer(optimizer, net, {"weight/momentum_buffer": torch.zeros(3, 2)})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_learning_rate_that_is_held(name):
    """The held parameters go on as before, bit for bit; the others stand still where the rate is 0."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    twin = copy.deepcopy(net)
    first, second = (OPTIMIZERS[name].build(n.parameters(), torch.tensor(0.1), 0.9, 0.01) for n in (net, twin))
    hold_learning_rate(first, net[2].parameters())
    set_learning_rate(first, 0.0)
    begun = {key: value.clone() for key, value in net.named_parameters()}
    for n, optimizer in ((net, first), (twin, second)):
        n(torch.arange(20.0).view(5, 4).sin()).square().mean().backward()
        optimizer.step()
    others = dict(twin.named_parameters())
    for key, value in net.named_parameters():
        assert torch.equal(value, others[key] if key.startswith("2.") else begun[key]), key
        assert not torch.equal(others[key], begun[key]), key
    first.zero_grad()
    assert all(p.grad is None for p in net.parameters())


def test_cosine_at_its_edges():
    assert cosine(0, 10) == 1
    assert cosine(5, 10) == pytest.approx(0.5)
    assert cosine(10, 10) == pytest.approx(0)
    assert [cosine(s, 10, warmup=4) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert cosine(4, 10, warmup=4) == 1
    assert cosine(9, 10, warmup=4) > 0
    assert cosine(0, 1) == 1
