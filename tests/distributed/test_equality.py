"""Two and three real processes give what one gives: losses, weights, bank, optimiser, features, votes."""

import os

import pytest
import torch

from onecrop.files import locked
from tests.distributed.cases import CASES, RESUMED, everything, resumed
from tests.distributed.launch import together

pytestmark = pytest.mark.xdist_group("distributed")
TOLERANCE = 1e-10  # of float64


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Number of processes -> what came out; each group goes on from the one before it, and one process from three."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_TESTRUNUID" in os.environ:  # once for all workers
        folder = folder.parent / os.environ["PYTEST_XDIST_TESTRUNUID"]
        folder.mkdir(exist_ok=True)
    files = {size: folder / f"{size}.pt" for size in (1, 2, 3)}
    with locked(folder / "lock", lambda: None):
        if not files[3].exists():
            torch.save(everything(), files[1])
            for size in (2, 3):
                together(size, "tests.distributed.cases", files[size], files[size - 1])
    out = {size: torch.load(file) for size, file in files.items()}
    out[1]["resumed"] = {name: resumed(name, out[3]) for name in RESUMED}
    return out


def assert_same(state, expected):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            state[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2, 3])
def test_losses_and_weights_are_those_of_one_process(results, size, case):
    assert_same(results[size][case]["final"], results[1][case]["final"])


@pytest.mark.parametrize("case", RESUMED)
@pytest.mark.parametrize("size", [2, 3, 1])
def test_a_checkpoint_is_read_by_any_number_of_processes(results, size, case):
    """2 go on from 1, 3 from 2, 1 from 3."""
    assert_same(results[size]["resumed"][case], results[1][case]["final"])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_group_that_goes_on_ends_with_the_bits_of_one_that_was_not_stopped(results, size):
    assert results[size]["differing"] == {case: [] for case in RESUMED}


def test_training_moves_what_is_compared(results):
    """Equality of things that stand still would prove nothing."""
    for case in CASES:
        saved, final = (results[1][case][when] for when in ("saved", "final"))
        moved = [name for name, value in final.items() if not torch.equal(value, saved[name])]
        assert any(name.startswith("method.backbone") for name in moved)
        assert any(name.startswith("sums.") for name in moved)
        assert not case.startswith(("sid", "npid")) or "method.bank.weight" in moved
        assert not case.startswith("pid") or "method.classifier" in moved
        assert not case.startswith("moco") or "method.queue.rows" in moved


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_give_the_whole(results, size):
    assert not any(results[size]["wrong"])


@pytest.mark.parametrize("size", [2, 3])
def test_every_process_finds_the_backbone_after_pretraining(results, size):
    assert not results[size]["blind"]


@pytest.mark.parametrize("size", [2, 3])
def test_random_rows_do_not_depend_on_the_number_of_processes(results, size):
    for name, value in results[1]["drawn"].items():
        assert torch.equal(results[size]["drawn"][name], value), name


def test_one_process_speaks(results):
    assert [results[size]["evaluated"]["speakers"].item() for size in (1, 2, 3)] == [1, 1, 1]


@pytest.mark.parametrize("size", [2, 3])
def test_evaluation_is_that_of_one_process_bit_for_bit(results, size):
    for name, value in results[1]["evaluated"].items():
        assert torch.equal(results[size]["evaluated"][name], value), name
