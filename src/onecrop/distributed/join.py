"""Joining the other processes, and ending together.

torchrun tells each process its place by environment variables; without them a process is alone and nothing here runs.
Every process writes a heartbeat into the store that torchrun keeps, and watches its neighbour's. One that fails says
why, one that is found silent is named, and the first such sentence ends all of them: nobody waits for a process that
will not answer, neither in a collective nor on a device.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from onecrop.distributed.group import Group, world
from onecrop.errors import StoppedError, UserError

BEAT_SECONDS = 0.5
SILENT_SECONDS = 15.0  # without a beat a process counts as gone: a long call that holds the interpreter is shorter
SUSPECT_SECONDS = 2.0  # the same, once a connection has broken or a signal has come
LONG = timedelta(days=7)  # one process may pack a folder for hours while the others wait: silence ends them, not time
DONE = b"done"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # how often torchrun has started the processes again
# what several processes share, and what to do when one of them is gone
TOGETHER = {
    "pretrain": "start it again with --resume, and it goes on from its last checkpoint",
    "evaluate": "start it again",
}


class _Terminated(BaseException):
    """SIGTERM outside of training: the system wants the machine back, or torchrun ends all after one has died."""


class Watch(threading.Thread):
    """Beats, and looks after one other process and after what has been announced."""

    def __init__(self, store: Any, group: Group, remedy: str) -> None:
        super().__init__(name="onecrop-watch", daemon=True)
        self.store, self.group, self.remedy = store, group, remedy
        store.set_timeout(timedelta(seconds=SILENT_SECONDS))
        self.node = os.environ.get("GROUP_RANK", "0")
        self.over = threading.Event()

    def run(self) -> None:
        neighbour, beats = (self.group.rank + 1) % self.group.size, 0
        seen, since = b"", time.monotonic()
        while not self.over.wait(BEAT_SECONDS):
            beats += 1
            try:
                self.store.set(f"beat {self.group.rank}", str(beats))
                self._heed()
                beat = self._beat(neighbour)
            except RuntimeError:  # the store went with the process that kept it
                if not self.over.is_set():
                    self._end(self.starter_gone())
                return
            if beat != seen or beat == DONE:
                seen, since = beat, time.monotonic()
            elif time.monotonic() - since > SILENT_SECONDS:
                self._end(self.announce(self.gone(neighbour)))

    def announce(self, sentence: str) -> str | None:
        """Tell the others -> what this process has to say: the sentence, unless another one was first."""
        mine = json.dumps({"node": self.node, "rank": self.group.rank, "sentence": sentence})
        return sentence if self.store.compare_set("failed", "", mine).decode() == mine else self.heard()

    def heard(self) -> str | None:
        """What has been announced, where nobody else will say it to those who look at this machine."""
        said = json.loads(self.store.get("failed"))
        return said["sentence"] if said["node"] != self.node and os.environ.get("LOCAL_RANK", "0") == "0" else None

    def gone(self, rank: int) -> str:
        missing = f"rank {rank} of {self.group.size} is gone (killed, out of memory, or its machine is not reachable)"
        return f"{missing}: {self.remedy}"

    def starter_gone(self) -> str:
        return f"the torchrun of rank 0, or its machine, is gone: {self.remedy}"

    def failed(self) -> bool:
        return self.store.check(["failed"])

    def silent(self) -> int | None:
        """A process that does not beat any more. Where several do not, the slow ones get time to."""
        others = [rank for rank in range(self.group.size) if rank != self.group.rank]
        before, begun = {rank: self._beat(rank) for rank in others}, time.monotonic()
        while True:
            time.sleep(SUSPECT_SECONDS)
            suspects = [rank for rank in others if DONE != before[rank] == self._beat(rank)]
            if len(suspects) <= 1 or time.monotonic() - begun > SILENT_SECONDS:
                return suspects[0] if suspects else None

    def leave(self) -> None:
        """The work is done: silence from here on is no failure. The keeper of the store goes last."""
        self.over.set()
        self.join(SUSPECT_SECONDS)  # or its last beat would come after this
        try:
            self.store.set(f"beat {self.group.rank}", DONE.decode())
            until = time.monotonic() + SILENT_SECONDS
            while self.group.first and time.monotonic() < until:
                if all(self._beat(rank) == DONE for rank in range(self.group.size)):
                    break
                time.sleep(BEAT_SECONDS / 10)
            dist.destroy_process_group()
        except RuntimeError:
            pass

    def _beat(self, rank: int) -> bytes:
        key = f"beat {rank}"
        return self.store.get(key) if self.store.check([key]) else b""

    def _heed(self) -> None:
        """End, when another process has announced that it does."""
        if self.failed() and json.loads(self.store.get("failed"))["rank"] != self.group.rank:
            self._end(self.heard())

    def _end(self, sentence: str | None) -> None:
        """At once: the main thread may wait in a collective that will never come back."""
        if sentence is not None:
            print(f"onecrop: {sentence}", file=sys.stderr, flush=True)
        os._exit(1)


@contextmanager
def joined(verb: str = "pretrain") -> Iterator[Group]:
    """The group of processes that torchrun started; whatever ends one of them ends all, with one sentence."""
    if verb not in TOGETHER and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(1)
        raise UserError(f"onecrop {verb} is the work of one process: start it without torchrun")
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield world()
        return
    group, store = _start()
    watch = Watch(store.clone(), group, TOGETHER[verb])  # a connection of its own
    watch.start()
    atexit.register(watch.leave)
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminate) if main else None
    try:
        yield group
    except BaseException as error:
        if main:  # this process ends by itself, and has something to say before
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        atexit.unregister(watch.leave)
        try:
            _explain(error, watch)
        except RuntimeError:  # the store went with the process that kept it
            raise UserError(watch.starter_gone()) from None
        raise
    if main:
        signal.signal(signal.SIGTERM, before)


def _start() -> tuple[Group, Any]:
    """-> the group, and the store that all of its processes see."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, rank, size = next(rendezvous("env://", timeout=LONG))
        # the store may be that of an earlier start, with addresses of processes that are no more
        store = PrefixStore(f"start {os.environ.get(RESTARTS, '0')}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LONG)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"cannot meet the other processes at {address}: {reason}") from None
    group = world()
    if not group.first:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # one process speaks
    return group, store


def restarted() -> bool:
    """torchrun --max-restarts has started the processes again: the run goes on from its checkpoint."""
    return os.environ.get(RESTARTS, "0") != "0"


def _terminate(number: int, frame: object) -> None:
    raise _Terminated


def _explain(error: BaseException, watch: Watch) -> None:
    """Turn what ended this process into one sentence for all of them."""
    if isinstance(error, SystemExit):
        return
    rank, group = watch.group.rank, watch.group
    if isinstance(error, StoppedError):
        if group.first:
            return
        sentence = None
    elif isinstance(error, UserError):
        sentence = watch.announce(f"rank {rank} of {group.size}: {error}")
    elif isinstance(error, KeyboardInterrupt):
        sentence = watch.announce("stopped")
    elif watch.failed():
        sentence = watch.heard()
    else:
        silent = watch.silent()
        if silent is None and isinstance(error, Exception) and not watch.failed():
            watch.announce(f"rank {rank} of {group.size} failed: {type(error).__name__}: {error}")
            return  # a fault of the program: its traceback is worth more than a sentence
        sentence = "stopped by SIGTERM" if silent is None else watch.gone(silent)
        sentence = watch.announce(sentence)
    if sentence is None:
        raise SystemExit(1) from None
    raise UserError(sentence) from None
