"""Long work: one line that says how far it has come, and a stop after the step under way where one is asked for.

The line is rewritten in place on a terminal, and appended now and then to a file.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO, TypeVar

ERASE = "\r\x1b[K"  # back to the beginning of the line, and all of it gone
Item = TypeVar("Item")


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def readable(size: float) -> str:
    """A number of bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


class Progress:
    """`update` as often as you like; it prints at most every `pause` seconds (0.2 on a terminal, 10 elsewhere)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.pause = 0.2 if self.live else 10.0
        self.started = self.last = time.monotonic()

    def due(self) -> bool:
        return time.monotonic() - self.last >= self.pause

    def update(self, line: str, final: bool = False) -> None:
        """Show `line`; `final` keeps it on the screen."""
        if not (final or self.due()):
            return
        self.last = time.monotonic()
        if self.live:
            width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be rewritten in place
            line = f"{ERASE}{line if final else line[:width]}" + ("\n" if final else "")
        else:
            line += "\n"
        self._write(line)

    def clear(self) -> None:
        """Leave nothing of it on a terminal: whatever is said next begins a line."""
        if self.live:
            self._write(ERASE)

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:  # its reader went away, or its disk is full: the work goes on unseen
            self.stream = sys.stderr = open(os.devnull, "w")  # noqa: SIM115

    def remaining(self, done: int, total: int) -> float:
        return (time.monotonic() - self.started) * (total - done) / max(done, 1)


def watched(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """The same items, with a line that says how many of them are done."""
    progress = Progress()
    for done, item in enumerate(items):
        if done:
            progress.update(f"{what}: {done / total:.0%}, {duration(progress.remaining(done, total))} left")
        yield item
    progress.clear()


class Waits(Protocol):
    """Something that may have to be waited for: a loader."""

    @property
    def seconds_waited(self) -> float: ...


class EpochClock:
    """Time spent on the steps of an epoch, without compilation, saving and probes."""

    def __init__(self, first_step: int, loader: Waits) -> None:
        self.first_step, self.started = first_step, time.monotonic()
        self.loader, self.waited_before = loader, loader.seconds_waited

    def exclude(self, seconds: float, steps: int = 0) -> None:
        self.started += seconds
        self.first_step += steps

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def steps_per_second(self, step: int) -> float:
        return (step - self.first_step) / max(self.seconds(), 1e-9)

    def waiting(self) -> float:
        """Share of the time in which the step waited for its data."""
        return (self.loader.seconds_waited - self.waited_before) / max(self.seconds(), 1e-9)


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Ctrl-C asks for a stop after the step under way (the list is then not empty); a second one stops at once.

    So does whoever ends the process from outside, a scheduler that wants the machine back; under torchrun its signal
    comes twice, and a second one changes nothing.
    """
    caught: list[int] = []

    def note(number: int, frame: object) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(number)

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
    except ValueError:  # not the main thread: no handler to set
        pass
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
