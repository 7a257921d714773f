import io
import os
import signal

import pytest

from onecrop.progress import EpochClock, Progress, duration, interruptible, watched


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_one_line_in_place_that_never_wraps(monkeypatch):
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((20, 5)))
    screen = Terminal()
    progress = Progress(screen)
    progress.pause = 0
    progress.update("x" * 50)
    progress.update("the last line, in full length", final=True)
    first, last = screen.getvalue().split("\r\x1b[K")[1:]
    assert first == "x" * 19
    assert last == "the last line, in full length\n"


def test_a_file_gets_plain_lines_now_and_then():
    file = io.StringIO()
    progress = Progress(file)
    for _ in range(100):
        progress.update("working")
    progress.update("done", final=True)
    assert file.getvalue() == "done\n"


def test_watched_items_are_the_same_and_leave_no_line_behind(monkeypatch):
    screen, now = Terminal(), [0.0]
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    seen = []
    for item in watched("abcd", 4, "letters"):
        seen.append(item)
        now[0] += 30
    assert seen == list("abcd")
    lines = screen.getvalue().split("\r\x1b[K")[1:]
    assert lines == ["letters: 25%, 1:30 left", "letters: 50%, 1:00 left", "letters: 75%, 0:30 left", ""]


def test_durations():
    assert [duration(s) for s in (0.4, 61, 3599.6, 7322)] == ["0:00", "1:01", "1:00:00", "2:02:02"]


def test_an_epochs_clock_leaves_out_what_is_not_training(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    class Loader:
        seconds_waited = 3.0

    loader = Loader()
    clock = EpochClock(10, loader)
    now[0], loader.seconds_waited = 130.0, 4.0
    clock.exclude(10.0, steps=1)  # ten seconds of compiling, in which one step was taken
    assert clock.seconds() == 20
    assert clock.steps_per_second(31) == 1.0
    assert clock.waiting() == 0.05


def test_a_second_ctrl_c_stops_at_once_and_a_second_wish_of_the_system_does_not():
    with interruptible() as caught:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert caught == [signal.SIGTERM, signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
