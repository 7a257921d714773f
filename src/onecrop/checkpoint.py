"""What a loop has to remember, as tensors by name: the module, its optimiser, and the sums of the row under way."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from onecrop.errors import UserError
from onecrop.optim import optimizer_tensors, restore_optimizer


def read_means(sums: dict[str, Tensor], num_steps: int, step: int, file: Path) -> dict[str, float]:
    """Read the sums of so many steps back from the device, as means. file: where the last checkpoint lies, if any.

    Of several processes one may look before the others do: what it says ends all of them.
    """
    means = {name: float(value) / num_steps for name, value in sums.items()}
    broken = next((name for name, value in means.items() if not math.isfinite(value)), None)
    if broken is not None:
        kept = f"; the last good state is in {file}" if file.exists() else ""
        raise UserError(f"{broken} is not a finite number at step {step}: try a lower --lr with another --out{kept}")
    return means


def loop_state(
    name: str, module: nn.Module, optimizer: torch.optim.Optimizer, sums: dict[str, Tensor], step: int
) -> dict[str, Tensor]:
    """name: what the module is called in the file. A broken state is refused: it would replace a good one."""
    state = {f"{name}.{key}": value for key, value in module.state_dict().items()}
    broken = [key for key, value in state.items() if value.is_floating_point() and not value.isfinite().all()]
    if broken:
        raise UserError(f"{broken[0]} is not finite at step {step}: lower --lr; the last checkpoint is kept")
    state |= {f"optimizer.{key}": value for key, value in optimizer_tensors(optimizer, module).items()}
    return state | {f"sums.{key}": value for key, value in sums.items()}


def restore_loop(
    tensors: dict[str, Tensor], name: str, module: nn.Module, optimizer: torch.optim.Optimizer, file: Path
) -> dict[str, Tensor]:
    """The way back, strictly -> the sums. file: where the tensors come from; none is kept in its memory, for Windows
    replaces no file that is in use."""

    def part(prefix: str) -> dict[str, Tensor]:
        return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}

    try:
        module.load_state_dict(part(f"{name}."), strict=True)
        restore_optimizer(optimizer, module, part("optimizer."))
    except (RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file} belongs to another run: {reason}") from None
    return {key: value.clone() for key, value in part("sums.").items()}
