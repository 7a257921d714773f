"""Stochastic depth over several processes as over one."""

from torch import Tensor, nn

from onecrop.distributed import ALONE, Group


class Depth(nn.Module):
    """In training an image's branch is left out with probability p, else divided by 1 − p: torchvision's "row" mode.

    Of several processes each draws for the whole batch, all from one seed, and takes what belongs to its images.
    """

    processes: Group = ALONE
    batch_size: int = 0  # of all processes, where there are several

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        total = len(x) if self.processes.size == 1 else self.batch_size
        part = self.processes.part(total)
        views = len(x) // (part.stop - part.start)  # of each image; x holds all first ones, then all second ones
        drawn = x.new_empty(views, total).bernoulli_(1 - self.p).div_(1 - self.p)
        return x * drawn[:, part].reshape(-1, *[1] * (x.ndim - 1))


def replace_depth(net: nn.Module) -> None:
    """Put a Depth in the place of every layer of torchvision's that does the same on one process."""
    from torchvision.ops import StochasticDepth

    for name, child in net.named_children():
        if isinstance(child, StochasticDepth):
            setattr(net, name, Depth(child.p))
        else:
            replace_depth(child)


def share_depth(net: nn.Module, processes: Group, batch_size: int) -> bool:
    """Let every Depth of `net` draw for the images of all processes -> has it any? Then all need one seed."""
    layers = [layer for layer in net.modules() if isinstance(layer, Depth)]
    for layer in layers:
        layer.processes, layer.batch_size = processes, batch_size
    return bool(layers)
