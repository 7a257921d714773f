import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from onecrop.errors import UserError
from onecrop.files import append_json_line, locked, read_json_lines, write_atomically
from onecrop.report.plots import plot_curves
from onecrop.tensors import load_tensors, save_tensors


def test_a_line_cut_short_costs_no_other_line(tmp_path):
    file = tmp_path / "results.jsonl"
    append_json_line(file, {"row": 1})
    with file.open("a") as torn:
        torn.write('{"row": 2, "accu')  # as a full disk leaves it
    assert read_json_lines(file) == [{"row": 1}]
    append_json_line(file, {"row": 3})
    append_json_line(file, {"row": 4})
    assert read_json_lines(file) == [{"row": 1}, {"row": 3}, {"row": 4}]


def test_a_figure_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    rows = [{"epoch": epoch, "step": 4 * epoch, "cross_entropy": 5.0 / epoch} for epoch in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = plot_curves(tmp_path, tmp_path / "new" / "curves.png")
    good = path.read_bytes()
    assert good.startswith(b"\x89PNG")

    def full(self, file, **more):
        file.write_bytes(b"half a pict")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure, "savefig", full)
    with pytest.raises(UserError, match="No space left on device"):
        plot_curves(tmp_path, path)
    assert path.read_bytes() == good
    assert [file.name for file in path.parent.iterdir()] == ["curves.png"]


def test_tied_weights_are_written_under_both_names(tmp_path):
    weight = torch.arange(4.0)
    save_tensors(tmp_path / "tied.safetensors", {"a": weight, "b": weight, "c": weight[1:]}, {})
    tensors, _ = load_tensors(tmp_path / "tied.safetensors")
    assert {key: value.tolist() for key, value in tensors.items()} == {
        "a": [0, 1, 2, 3],
        "b": [0, 1, 2, 3],
        "c": [1, 2, 3],
    }


@pytest.mark.skipif(os.name != "posix", reason="asks the system how a file was opened")
def test_a_file_is_flushed_through_a_handle_that_may_write(tmp_path, monkeypatch):
    """Windows refuses any other: nothing at all could be written there."""
    import fcntl

    modes = []
    honest = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: modes.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE) or honest(file)
    )
    write_atomically(tmp_path / "file", b"content")
    assert modes == [os.O_RDWR]
    assert (tmp_path / "file").read_bytes() == b"content"


@pytest.mark.parametrize("system", ["posix", "win32"])
def test_one_process_at_a_time(tmp_path, monkeypatch, system):
    """On Windows by its own call, here by a stand-in for it that does what its documentation says."""
    held = set()

    def locking(file, mode, count):
        place = os.fstat(file).st_ino
        if place in held:
            raise PermissionError(13, "Permission denied")
        held.add(place)

    if system == "win32":
        monkeypatch.setattr(sys, "platform", "win32")
        monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))

    def refuse():
        raise UserError("in use")

    def release():  # as the first process' end does
        waited.append(True)
        held.clear()
        first.__exit__(None, None, None)

    waited = []
    first = locked(tmp_path / "lock", refuse)
    first.__enter__()
    with locked(tmp_path / "another", refuse):
        pass
    with pytest.raises(UserError, match="in use"), locked(tmp_path / "lock", refuse):
        pass
    with locked(tmp_path / "lock", release):
        assert waited == [True]
