"""benchmarks/detection.py where time runs out: what is finished can be scored, and every run's words come back."""

import os
import sys
import tarfile
import time
from argparse import Namespace
from pathlib import Path

import pytest

FINISHED = """
import json, os, pathlib
folder = pathlib.Path({folder!r})
(folder / "checkpoint").mkdir(parents=True)
(folder / "checkpoint" / "state.safetensors").write_bytes(bytes(10))
rows = [{{"step": 20, "seconds": 10}}, {{"step": 40, "seconds": 4}}, {{"step": 60, "seconds": 2}}]
(folder / "metrics.jsonl").write_text("\\n".join(map(json.dumps, rows)))
(folder / "detections.json").write_text(os.environ["OMP_NUM_THREADS"])
"""
WORK = {
    "scratch": FINISHED,
    "untrained": "raise RuntimeError('CUDA error: an example of it')",
    "pretrained": "import time; print('step 1 of 4', flush=True); time.sleep(60)",
}


@pytest.fixture
def detection(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import detection

    def order(kind, weights, out, iterations, args):
        return [sys.executable, "-c", WORK[weights].format(folder=str(out))]

    monkeypatch.setattr(detection, "command", order)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield detection
    for name in ("detection", "measuring"):
        sys.modules.pop(name, None)


def test_what_is_finished_when_time_runs_out_can_be_scored(detection, tmp_path, capsys, monkeypatch):
    out, work, rows = tmp_path / "found", tmp_path / "work", []
    for folder in (out, work):
        folder.mkdir()
    args = Namespace(voc="VOCdevkit", coco=None, jobs=3, out=out, folder=out)
    (found,) = detection.wave(work, {name: name for name in WORK}, 4, time.monotonic() + 3, args)
    assert (found.folder.name, found.step) == ("voc07-scratch-4", 6 / 40)  # without the first, which load kernels
    said = capsys.readouterr().out
    assert "voc07-untrained-4: failed with 1\n" in said  # or -11, where it was a segmentation fault
    assert "CUDA error: an example of it" in said
    assert "voc07-pretrained-4: no time left\nstep 1 of 4" in said
    with tarfile.open(out / "runs-4.tar.gz") as archive:
        assert set(archive.getnames()) == {
            *(f"voc07-{name}-4.log" for name in WORK),
            *(f"voc07-scratch-4/{name}" for name in ("detections.json", "metrics.jsonl")),
        }
    assert (work / "voc07-scratch-4" / "detections.json").read_text() == "5"  # cores for each of three on sixteen
    detection.save(detection.result_file("Detection", []), out / "made.json")
    monkeypatch.setattr(
        detection, "row", lambda run: rows.append(run.name) or {"set": "voc07", "iterations": 4, "start": "scratch"}
    )
    args.out = tmp_path / "scored.json"
    detection.score(args)
    assert rows == ["voc07-scratch-4"]
    assert '"start": "scratch"' in args.out.read_text()


def test_a_call_in_which_nothing_was_finished_is_said_to_be_so(detection, tmp_path):
    work, args = tmp_path / "work", Namespace(voc="x", coco=None, jobs=1, out=tmp_path, folder=tmp_path)
    work.mkdir()
    assert detection.wave(work, {"untrained": "untrained"}, 4, time.monotonic() - 1, args) == []
    detection.save(detection.result_file("Detection", []), tmp_path / "made.json")
    with pytest.raises(SystemExit, match=r"no run of .* was finished"):
        detection.score(args)


def test_lengths_have_files_of_their_own_and_are_not_overwritten(detection, tmp_path):
    """A hundred masks a picture are 3 MB a run, and what comes back from elsewhere may have a limit a file."""
    work, args = tmp_path / "work", Namespace(minutes=1.0, voc="x", coco=None, jobs=1, out=tmp_path)
    work.mkdir()
    for iterations in (4, 14):
        detection.wave(work, {"scratch": "scratch"}, iterations, time.monotonic() + 60, args)
        with tarfile.open(tmp_path / f"runs-{iterations}.tar.gz") as archive:
            assert {name.partition("/")[0] for name in archive.getnames()} == {
                *(f"voc07-scratch-{iterations}", f"voc07-scratch-{iterations}.log")
            }
    with pytest.raises(SystemExit, match="not overwritten"):
        detection.train(args)
