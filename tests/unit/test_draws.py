import torch

from onecrop.draws import _mix, draws, fold


def test_tensors_and_ints_hash_alike():
    values = [0, 1, 2, 12345, 2**32 - 1]
    assert _mix(torch.tensor(values)).tolist() == [_mix(v) for v in values]


def test_numbers_depend_on_key_name_slot_and_column_alone():
    a = draws(fold(1, 2), 8, "cpu").uniform("x", 5)
    assert torch.equal(a, draws(fold(1, 2), 8, "cpu").uniform("x", 5))
    assert torch.equal(a[3:6], draws(fold(1, 2), 3, "cpu", first=3).uniform("x", 5))  # another process' part
    assert torch.equal(a[:, :2], draws(fold(1, 2), 8, "cpu").uniform("x", 2))
    for other in (draws(fold(1, 3), 8, "cpu").uniform("x", 5), draws(fold(1, 2), 8, "cpu").uniform("y", 5)):
        assert (a == other).float().mean() < 0.1


def test_numbers_are_uniform_and_independent():
    x = draws(7, 4000, "cpu").uniform("test", 6)
    assert x.min() >= 0
    assert x.max() < 1
    counts = torch.histc(x.flatten(), 20, 0, 1)
    chi_square = ((counts - 1200) ** 2 / 1200).sum()
    assert chi_square < 45  # 19 degrees of freedom: p about .001
    assert (torch.corrcoef(x.T) - torch.eye(6)).abs().max() < 0.06
    assert torch.corrcoef(torch.stack([x[:-1, 0], x[1:, 0]]))[0, 1].abs() < 0.06
    steps = torch.stack([draws(fold(0, "step", s), 1, "cpu").uniform("test", 1)[0, 0] for s in range(2000)])
    assert abs(steps.mean() - 0.5) < 0.03
    assert torch.corrcoef(torch.stack([steps[:-1], steps[1:]]))[0, 1].abs() < 0.08


def test_once_is_the_same_for_every_part_of_the_batch():
    whole, part = draws(5, 8, "cpu"), draws(5, 2, "cpu", first=6)
    assert torch.equal(whole.once("mix", 3), part.once("mix", 3))
