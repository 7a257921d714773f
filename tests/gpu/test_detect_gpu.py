"""The detector on a CUDA device: it computes what it does on a CPU, and learns by heart with the paper's networks."""

from importlib.util import find_spec

import pytest
import torch

from onecrop.detect.batches import Sample
from onecrop.detect.model import Detector
from onecrop.nets import build_backbone
from tests.conftest import DATA
from tests.integration.test_detect_real import learn_by_heart

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # CUDA's libraries warn about what is not ours
CUDA = torch.device("cuda")


def samples(draw):
    """Two noisy pictures with three objects, so small that no sampler has to choose: nothing is left to chance."""
    found = []
    for height, width, boxes in ((48, 64, [[4, 4, 40, 30], [30, 10, 60, 44]]), (40, 48, [[8, 6, 44, 36]])):
        image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=draw)
        masks = torch.zeros(len(boxes), 2 * height, 2 * width, dtype=torch.uint8)  # the file is twice as large
        for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
            mask[2 * top : 2 * bottom, 2 * left : left + right] = 1  # the left half of the box
        labels = torch.arange(1, len(boxes) + 1)
        found.append(Sample(image, torch.tensor(boxes, dtype=torch.float32), labels, masks, torch.full((4,), 0.5)))
    return found


def learned(model, pictures):
    """Loss terms of a step and the size of every gradient, on the CPU."""
    terms = model.train()(pictures)
    model.zero_grad()
    torch.stack(list(terms.values())).sum().backward()
    sizes = {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}
    return {name: value.item() for name, value in terms.items()}, sizes


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 0.02), ("bfloat16", 0.1)])
def test_a_step_and_its_detections_are_those_of_a_cpu(precision, tolerance):
    """Boxes, masks, backward and inference, with no data and in seconds."""
    torch.manual_seed(0)
    pictures = samples(torch.Generator().manual_seed(1))
    model = Detector(build_backbone("resnet18", "standard"), 4, masks=True, size_scale=0.2, num_crops=8192)
    terms, sizes = learned(model, pictures)
    model = model.to(CUDA).to(memory_format=torch.channels_last)
    model.dtype = getattr(torch, precision)
    there = [picture.to(CUDA) for picture in pictures]
    terms_there, sizes_there = learned(model, there)
    assert terms_there == pytest.approx(terms, rel=tolerance, abs=0.01)
    assert sizes_there == pytest.approx(sizes, rel=5 * tolerance, abs=0.001)
    model.eval()
    with torch.no_grad():
        for threshold, count in ((0.0, 100), (2.0, 0)):  # all that is allowed, and nothing at all
            model.heads.score_thresh = threshold
            for result in model(there):
                assert {name: len(value) for name, value in result.items()} == dict.fromkeys(
                    ("boxes", "scores", "labels", "masks"), count
                )
                assert all(value.is_cuda and value.dtype != torch.bfloat16 for value in result.values())


@pytest.mark.skipif(not (DATA / "unpack.py").exists(), reason="no real data beside the checkout")
@pytest.mark.parametrize(("backbone", "precision"), [("resnet18", "float32"), ("resnet50", "bfloat16")])
def test_one_batch_of_photographs_is_learned_by_heart(tmp_path, monkeypatch, backbone, precision):
    """Seven photographs from scratch to a box AP above .9; masks too, where what draws them is installed."""
    photographs = (30, 34, 42, 81, 92, 326, 502)
    shrunk = {"scale": 600 / 90_000, "size_scale": 0.3, "crops": 64, "device": "cuda"}
    if find_spec("faster_coco_eval") is None:
        shrunk |= {"masks": False, "metric": "voc07"}
    rows = learn_by_heart(tmp_path, monkeypatch, photographs, backbone=backbone, precision=precision, **shrunk)
    assert rows[0]["AP"] > 90
    assert all(row["AP50"] > 90 for row in rows)
