"""Near-duplicates: copies are found, other pictures are not. On photographs where a copy lies beside the checkout."""

import io

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from onecrop.data.duplicates import Originals, look_at
from tests.conftest import DATA
from tests.pictures import photographs, picture


def square(image):
    return image.convert("RGB").resize((64, 64), Image.Resampling.BILINEAR)


def again(image, quality):
    content = io.BytesIO()
    image.save(content, "JPEG", quality=quality)
    return Image.open(content)


def cut(image, left, top, right, bottom):
    w, h = image.size
    return image.crop((round(left * w), round(top * h), round((1 - right) * w), round((1 - bottom) * h)))


COPIES = {  # what is done to a picture -> share of 480 photographs that must be recognised
    "same": (lambda i: i, 1.0),
    "quality 30": (lambda i: again(i, 30), 0.99),
    "quality 10": (lambda i: again(i, 10), 0.99),
    "half the size": (lambda i: i.resize((i.width // 2, i.height // 2)), 1.0),
    "half, quality 50": (lambda i: again(i.resize((i.width // 2, i.height // 2)), 50), 1.0),
    "grey": (lambda i: i.convert("L"), 0.85),
    "darker": (lambda i: ImageEnhance.Brightness(i).enhance(0.85), 0.99),
    "less contrast": (lambda i: ImageEnhance.Contrast(i).enhance(0.8), 1.0),
    "cut 1 % all round": (lambda i: cut(i, 0.01, 0.01, 0.01, 0.01), 0.99),
    "cut 2 % all round": (lambda i: cut(i, 0.02, 0.02, 0.02, 0.02), 0.98),
    "cut 3 % all round": (lambda i: cut(i, 0.03, 0.03, 0.03, 0.03), 0.9),
    "cut 5 % at one side": (lambda i: cut(i, 0.05, 0, 0, 0), 0.85),
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    if not (DATA / "unpack.py").exists():
        pytest.skip("no real data beside the checkout")
    return [Image.open(file).convert("RGB") for file in photographs(tmp_path_factory.mktemp("photos"))]


def test_different_photographs_are_kept_apart(photos):
    """114,960 pairs; one is of the same man on the same motorcycle, taken a moment apart."""
    answers = Originals().add(look_at([square(photo) for photo in photos]))
    assert sum(answer is not None for answer in answers) == 1


@pytest.mark.parametrize("kind", COPIES)
def test_copies_of_photographs_are_found(photos, kind):
    make, least = COPIES[kind]
    found = 0
    for photo in photos:
        found += Originals().add(look_at([square(photo), square(make(photo))])) == [None, 0]
    assert found >= least * len(photos), f"{found} of {len(photos)}"


def test_drawn_pictures():
    """The same without real data: ten pictures, each followed by a copy of the one before it."""
    squares = []
    for number in range(10):
        drawn = picture(number, (120, 90))
        squares += [square(drawn), square(again(drawn, 40))]
    assert Originals().add(look_at(squares)) == [answer for number in range(10) for answer in (None, number)]


def test_the_answer_does_not_depend_on_how_many_come_at_a_time():
    squares = [square(again(picture(n % 17, (120, 90)), 30 + n)) for n in range(60)]
    whole = Originals().add(look_at(squares))
    one_by_one, originals = [], Originals()
    for one in squares:
        one_by_one += originals.add(look_at([one]))
    assert whole == one_by_one
    assert sum(answer is None for answer in whole) == originals.count == 17


def test_a_repeat_of_a_repeat_is_compared_with_the_original():
    """A slow drift, frame by frame: once it is far from the original, a new original is kept."""
    wide = picture(1, (900, 300))
    frames = [square(wide.crop((x, 0, x + 300, 300))) for x in range(0, 300, 6)]
    answers = Originals().add(look_at(frames))
    kept = sum(answer is None for answer in answers)
    assert 3 <= kept <= 25
    assert answers[0] is None
    assert answers[1] == 0


def test_plain_colours():
    """No structure to compare: the colour decides."""
    colours = ["black", "white", "red", "lime", "blue", (128, 128, 128)]
    plain = [Image.new("RGB", (64, 64), colour) for colour in colours]
    originals = Originals()
    assert originals.add(look_at(plain)) == [None] * len(colours)
    assert originals.add(look_at(plain[::-1])) == list(range(len(colours)))[::-1]


def test_noise_is_kept_apart_and_nothing_is_no_picture():
    originals = Originals()
    rng = np.random.default_rng(0)
    for _ in range(20):
        noise = [Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)) for _ in range(50)]
        assert originals.add(look_at(noise)) == [None] * 50
    assert originals.count == 1000
    assert originals.add(look_at([])) == []
