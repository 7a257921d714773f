import pytest
import torch

from onecrop.bank import MemoryBank, SoftLabels, corrected_direction
from onecrop.losses import instance_loss


def unit(*shape, seed=0):
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=1, keepdim=True)


@pytest.fixture
def bank():
    torch.manual_seed(0)
    return MemoryBank(12, 6, momentum=0.3, dtype=torch.float64)


INDEX = torch.tensor([7, 2, 9])


def test_starts_with_random_unit_rows(bank):
    torch.testing.assert_close(bank.weight.norm(dim=1), torch.ones(12, dtype=torch.float64))
    assert bank.weight.unique(dim=0).shape[0] == 12


def test_plain_update_is_equation_3(bank):
    before, z = bank.weight.clone(), unit(3, 6)
    bank.update(INDEX, z)
    for place, i in enumerate(INDEX.tolist()):
        moved = 0.3 * before[i] + 0.7 * z[place]
        torch.testing.assert_close(bank.weight[i], moved / moved.norm())
    others = [i for i in range(12) if i not in INDEX.tolist()]
    assert torch.equal(bank.weight[others], before[others])


def test_corrected_update_is_equations_5_and_6(bank):
    before, z = bank.weight.clone(), unit(3, 6)
    p = torch.rand(3, 3, dtype=torch.float64)  # [j, i]: image j's probability of row i
    bank.update(INDEX, z, p)
    for i, row in enumerate(INDEX.tolist()):
        direction = sum(((1.0 if i == j else 0.0) - p[j, i]) * z[j] for j in range(3))
        moved = 0.3 * before[row] + 0.7 * direction
        torch.testing.assert_close(bank.weight[row], moved / moved.norm())


def test_corrected_direction_is_the_gradient_of_the_cross_entropy(bank):
    """Eq. 4: with the loss summed over the batch, −T·∂CE/∂w_i restricted to the batch is ẑ_i."""
    z = unit(3, 6)
    rows = bank.weight.clone().requires_grad_()
    logits = z @ rows.T / 0.5
    torch.nn.functional.cross_entropy(logits, INDEX, reduction="sum").backward()
    out = instance_loss(z, bank.weight, INDEX, temperature=0.5, kl_temperature=1.0)
    direction = z - out.batch_probabilities.T @ z
    torch.testing.assert_close(direction, -0.5 * rows.grad[INDEX])


@pytest.mark.parametrize("mix", [0.7, [0.9, 0.6, 0.5]], ids=["of the batch", "of each image"])
def test_soft_labels_make_it_the_gradient_of_a_mixed_cross_entropy(bank, mix):
    """Eq. 4 with y_jj = μ_j and y_ji = 1 − μ_j for the partner i of image j."""
    z, partner, mix = unit(3, 6), torch.tensor([1, 2, 0]), torch.tensor(mix, dtype=torch.float64)
    rows = bank.weight.clone().requires_grad_()
    loss = 0.0
    for j, share in enumerate(mix.expand(3)):
        log_p = torch.log_softmax(z[j] @ rows.T / 0.5, 0)
        loss = loss - share * log_p[INDEX[j]] - (1 - share) * log_p[INDEX[partner[j]]]
    loss.backward()
    p = instance_loss(z, bank.weight, INDEX, temperature=0.5, kl_temperature=1.0).batch_probabilities
    labels = SoftLabels(partner, mix)
    torch.testing.assert_close(corrected_direction(z, p, labels), -0.5 * rows.grad[INDEX])
    before = bank.weight.clone()
    bank.update(INDEX, z, p, labels, momentum=torch.tensor(0.25))
    moved = 0.25 * before[INDEX] - 0.75 * 0.5 * rows.grad[INDEX]
    torch.testing.assert_close(bank.weight[INDEX], moved / moved.norm(dim=1, keepdim=True))


def test_a_row_without_direction_stays(bank):
    before = bank.weight.clone()
    bank.update(torch.tensor([4]), -before[4:5] * 0.3 / 0.7)
    assert torch.equal(bank.weight, before)
    assert torch.isfinite(bank.weight).all()


def test_survives_saving(bank):
    other = MemoryBank(12, 6)
    other.load_state_dict(bank.state_dict())
    torch.testing.assert_close(other.weight, bank.weight.float())


def test_momentum_outside_its_range_is_refused():
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        MemoryBank(3, 2, momentum=1.0)
