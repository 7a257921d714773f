"""The detector on a CUDA device, with the networks the paper's tables use."""

from importlib.util import find_spec

import pytest

from tests.conftest import DATA
from tests.integration.test_detect_real import learn_by_heart

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # CUDA's libraries warn about what is not ours
    pytest.mark.skipif(not (DATA / "unpack.py").exists(), reason="no real data beside the checkout"),
    pytest.mark.skipif(find_spec("faster_coco_eval") is None, reason="scores need faster-coco-eval"),
]


@pytest.mark.parametrize("backbone", ["resnet18", "resnet50"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_one_batch_of_photographs_is_learned_by_heart(tmp_path, monkeypatch, backbone, precision):
    """Seven photographs from scratch to a box AP above .9."""
    photographs = (30, 34, 42, 81, 92, 326, 502)
    shrunk = {"scale": 600 / 90_000, "size_scale": 0.3, "crops": 64, "device": "cuda"}
    boxes, masks = learn_by_heart(tmp_path, monkeypatch, photographs, backbone=backbone, precision=precision, **shrunk)
    assert boxes["AP"] > 90
    assert masks["AP50"] > 90
