"""One training step: refill the batch, forward, backward, optimiser, sums for the log.

On a GPU the step is compiled, where the run is long enough for that to pay, run a few times, and then captured as one
CUDA graph: the host only writes the batch's index, its key and the learning rate, and never waits. Of several
processes each makes the step on its part of the batch, not compiled, and DistributedDataParallel adds the gradients up.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from onecrop.data import Loader
from onecrop.device import capture, seed_step
from onecrop.draws import fold
from onecrop.methods import Method
from onecrop.nets.depth import share_depth
from onecrop.optim import set_learning_rate

WARM_UP = 3  # real training steps before the capture: compilation, optimiser state, library handles


class TrainStep:
    def __init__(
        self,
        method: Method,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        seed: int,
        fast: bool,
        compiled: bool = True,
    ) -> None:
        """fast: capture, and compile before it unless told otherwise (CUDA only, one process only)."""
        fast = fast and method.group.size == 1
        self.method, self.optimizer, self.loader, self.fast = method, optimizer, loader, fast
        shared = share_depth(method, method.group, loader.batch_size)
        # layers of other makes draw for the images of one process: each of them gets a seed of its own
        self.seed = seed if shared or method.group.first else fold(seed, "rank", method.group.rank)
        self.batch = loader.empty()
        self.progress = torch.zeros((), device=loader.device)
        self.sums: dict[str, Tensor] = {}  # of terms and watched values since the last reset, on the device
        self.forward: Callable[..., dict[str, Tensor]] = method if method.group.size == 1 else replicate(method)
        self.compiled = fast and compiled
        if self.compiled:
            torch.compiler.reset()  # of an earlier run in this process: the compiler keeps a limited number of variants
            self.forward = torch.compile(method, dynamic=False)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.taken = 0

    @property
    def ready(self) -> bool:
        """Compilation and capture are behind us: from here on a step takes its usual time."""
        return self.taken > WARM_UP or not self.fast

    def __call__(self, step: int, lr: float, progress: float) -> None:
        self.loader.refill(self.batch, step)
        self.progress.fill_(progress)
        set_learning_rate(self.optimizer, lr)
        seed_step(self.seed, step)
        if self.graph is None and self.fast and self.taken >= WARM_UP:
            self.graph, _ = capture(self._compute)
        if self.graph is not None:
            self.graph.replay()
        else:
            self._compute()
        self.taken += 1

    def _compute(self) -> None:
        if not self.compiled:
            with torch.compiler.set_stance("force_eager"):  # the optimiser has compiled parts of its own
                self._work()
            return
        with warnings.catch_warnings():  # compilers warn about what a user cannot mend
            warnings.simplefilter("ignore")
            self._work()

    def _work(self) -> None:
        self.method.train()
        terms = self.forward(self.batch)
        torch.stack(list(terms.values())).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.method.after_step(self.progress)
        values = {**terms, **self.method.watch}
        if list(self.sums) != list(values):  # the first step, or the first after a checkpoint, which sorts by name
            self.sums = {name: self.sums.get(name, torch.zeros_like(value)) for name, value in values.items()}
        for name, value in values.items():
            self.sums[name].add_(value.detach())

    def reset_sums(self) -> None:
        for value in self.sums.values():
            value.zero_()


def replicate(method: Method) -> DistributedDataParallel:
    """The method with its weights as the first process has them, and gradients added up over all processes.

    Tables in parts are left alone: each process has the whole gradient of its own rows. So are buffers: those that the
    processes share they work out alike.
    """
    alone = [*method.shards, *(name for name, _ in method.named_buffers())]
    alone += [f".{name}" for name in method.shards]  # so it calls, in one place, what the outermost module holds
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(method, alone)
    replica = DistributedDataParallel(method)
    _settle(replica, method)
    return replica


def _settle(replica: DistributedDataParallel, method: Method) -> None:
    """A backward pass before all others, whose gradients are dropped, with those of the last layers first.

    The replica groups gradients anew by the first pass it sees, and the sum of three numbers depends on their order,
    which depends on the groups: a resumed run would round its first step otherwise than one that was never stopped.
    """
    method.forward = lambda: sum(p.sum() for p in method.parameters() if p.requires_grad)  # type: ignore
    replica().backward()
    del method.forward
    method.zero_grad(set_to_none=True)
