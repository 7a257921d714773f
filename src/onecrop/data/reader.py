"""Reading ahead: batches that do not fit on the device are gathered in the background and copied under the compute."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

POLL_SECONDS = 5e-4  # how often a wait for data looks whether the device has run dry
AHEAD = 3  # batches gathered before they are asked for


class _Slot(NamedTuple):
    images: Tensor  # pinned host memory
    index: Tensor  # type: ignore[assignment]
    on_device: Tensor  # where the copy lands, so that the batch in use stays untouched
    index_on_device: Tensor
    copied: torch.cuda.Event


class Reader:
    """memory map → pinned buffer (background thread) → staging buffer on the GPU (own stream) → the batch."""

    def __init__(
        self,
        images: Tensor,
        places: Tensor | None,
        batch_size: int,
        index_of: Callable[[int], Tensor],
        device: torch.device,
        part: slice,
    ) -> None:
        """places: where in `images` the images of the set stand; None: in order.

        part: the images of each batch that are read here; the index is that of the whole batch.
        """
        self.images, self.places, self.index_of, self.part = images, places, index_of, part
        shape = (part.stop - part.start, *images.shape[1:])
        self.slots = [
            _Slot(
                torch.empty(shape, dtype=torch.uint8, pin_memory=True),
                torch.empty(batch_size, dtype=torch.int64, pin_memory=True),
                torch.empty(shape, dtype=torch.uint8, device=device),
                torch.empty(batch_size, dtype=torch.int64, device=device),
                torch.cuda.Event(),
            )
            for _ in range(AHEAD)
        ]
        self.stream = torch.cuda.Stream(device)
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="onecrop-reader")  # one: the gather itself is parallel
        self.pending: dict[int, Future[_Slot]] = {}
        self.seconds_waited = 0.0

    def fetch(self, step: int, images: Tensor, index: Tensor) -> None:
        """Fill `images` and `index` on the device with the batch of `step`, and begin with those after it."""
        if step not in self.pending:  # the first step, or a jump
            for future in self.pending.values():
                future.cancel()
            self.pending.clear()
        for ahead in range(step, step + AHEAD):
            if ahead not in self.pending:
                self.pending[ahead] = self.pool.submit(self._gather, ahead)
        current = torch.cuda.current_stream()
        slot = self._wait(self.pending.pop(step), current.record_event())
        current.wait_event(slot.copied)
        images.copy_(slot.on_device)
        index.copy_(slot.index_on_device)
        slot.copied.record(current)  # from now on: the event after which the slot may be written again

    def _wait(self, future: Future[_Slot], busy: torch.cuda.Event) -> _Slot:
        """The time counts from when the device has nothing left to do: before that the host is only ahead of it."""
        idle_since = None
        while True:
            try:
                slot = future.result(timeout=POLL_SECONDS)
                break
            except TimeoutError:
                if idle_since is None and busy.query():
                    idle_since = time.monotonic()
        if idle_since is not None:
            self.seconds_waited += time.monotonic() - idle_since
        return slot

    def _gather(self, step: int) -> _Slot:
        slot = self.slots[step % AHEAD]
        slot.copied.synchronize()  # in this thread alone: the slot's last batch has left it
        slot.index.copy_(self.index_of(step))
        torch.index_select(self.images, 0, placed(slot.index[self.part], self.places), out=slot.images)
        with torch.cuda.stream(self.stream):
            slot.on_device.copy_(slot.images, non_blocking=True)
            slot.index_on_device.copy_(slot.index, non_blocking=True)
            slot.copied.record(self.stream)
        return slot


def placed(index: Tensor, places: Tensor | None) -> Tensor:
    """Where the images of `index` stand in what is stored."""
    return index if places is None else places[index]
