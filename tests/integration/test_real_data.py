"""Real data in their official layouts, where a copy lies beside the checkout; skipped elsewhere."""

import subprocess
import sys

import numpy as np
import pytest

from onecrop.data import load
from onecrop.data.sources import Request, load_labelled
from tests.conftest import DATA

pytestmark = pytest.mark.skipif(not (DATA / "unpack.py").exists(), reason="no real data beside the checkout")


def unpack(name, folder):
    subprocess.run([sys.executable, DATA / "unpack.py", name, "--out", folder], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar(tmp_path, name, classes):
    unpack(name, tmp_path)
    sets = load_labelled(name, Request(str(tmp_path)))
    assert (len(sets.train), len(sets.test)) == (50_000, 10_000)
    assert np.bincount(sets.train.labels).tolist() == [50_000 // classes] * classes
    assert np.bincount(sets.test.labels).tolist() == [10_000 // classes] * classes
    assert len(set(sets.train.classes)) == classes
    assert {"cifar10": "airplane", "cifar100": "apple"}[name] == sets.train.classes[0]
    assert 110 < sets.train.images.mean() < 130
    subset = load(name, "train", Request(str(tmp_path), subset=1000, seed=1))
    assert len(subset) == 1000
    assert len(np.unique(subset.labels)) == classes


def test_tiny_imagenet(tmp_path):
    unpack("tiny-imagenet", tmp_path)
    sets = load_labelled("tiny-imagenet", Request(str(tmp_path)))
    assert (len(sets.train), len(sets.test)) == (8000, 2000)
    assert np.bincount(sets.train.labels).tolist() == [40] * 200
    assert np.bincount(sets.test.labels).tolist() == [10] * 200
    assert sets.train.images.shape[1:] == (3, 64, 64)


def test_a_folder_of_photographs(tmp_path):
    unpack("voc-mini", tmp_path)
    photos = load(str(tmp_path / "VOCdevkit"), request=Request(image_size=64))
    assert len(photos) == 480
    assert photos.labels is None
    assert photos.aspect.min() < 0.8
    assert photos.aspect.max() > 1.3
