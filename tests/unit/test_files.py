import json

import pytest
import torch

from onecrop.errors import UserError
from onecrop.files import append_json_line, read_json_lines
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
