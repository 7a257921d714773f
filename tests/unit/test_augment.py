"""At fixed parameters each operation is torchvision's; drawn at random, the distributions match."""

import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from onecrop.augment import (
    CROP_TRIES,
    MEAN,
    STD,
    Augment,
    CutMix,
    beta_quantiles,
    blend,
    central_crop,
    colour_jitter,
    crop_boxes,
    gaussian_blur,
    grey,
    normalise,
    resample,
    shift_hue,
)
from onecrop.draws import draws


@pytest.fixture
def pictures():
    """Smooth and sharp content: [6, 3, 40, 40] uint8."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(6, 3, 5, 5, generator=generator)
    fine = torch.nn.functional.interpolate(coarse, 40, mode="bilinear") * 0.8
    return ((fine + 0.2 * torch.rand(6, 3, 40, 40, generator=generator)) * 255).to(torch.uint8)


@pytest.fixture
def floats(pictures):
    return pictures.float() / 255


@pytest.mark.parametrize("size", [12, 32, 64])  # down, about the same, up
def test_resample_is_resized_crop(pictures, floats, size):
    boxes = [[0, 0, 40, 40], [3, 5, 20, 30], [10, 0, 30, 8], [39, 39, 1, 1], [7, 7, 25, 25], [1, 2, 13, 38]]
    boxes = torch.tensor(boxes)
    flip = torch.tensor([False, True, False, False, True, True])
    out = resample(pictures, boxes.float(), size, flip)
    for i in range(6):
        top, left, height, width = boxes[i].tolist()
        expected = TF.resized_crop(floats[i], top, left, height, width, [size, size], antialias=True)
        expected = TF.horizontal_flip(expected) if flip[i] else expected
        torch.testing.assert_close(out[i], expected, rtol=0, atol=2e-5)


def test_blends_are_torchvisions(floats):
    factor = torch.linspace(0.6, 1.4, 6)
    for which, operation in enumerate((TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation)):
        out = blend(floats, factor, torch.full((6,), which))
        for i in range(6):
            torch.testing.assert_close(out[i], operation(floats[i], factor[i].item()), rtol=0, atol=1e-5)


def test_hue_is_torchvisions(floats):
    floats[0] = floats[0, :1]  # a grey picture has no hue
    floats[1, 0] = floats[1, 1]  # ties between the channels
    shift = torch.linspace(-0.5, 0.5, 6)
    out = shift_hue(floats, shift)
    for i in range(6):
        torch.testing.assert_close(out[i], TF.adjust_hue(floats[i], shift[i].item()), rtol=0, atol=1e-4)


def test_jitter_applies_the_order_of_each_image(floats):
    """Image i turns its hue before operation i mod 4 of its own order."""
    operations = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation)
    order = torch.tensor([[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0], [2, 0, 1], [0, 2, 1]])
    factors = 0.6 + 0.8 * torch.rand(6, 3, generator=torch.Generator().manual_seed(3))
    hue = torch.linspace(-0.1, 0.1, 6)
    for first in (0, 3):
        out = colour_jitter(floats, factors, hue, order, first)
        for i in range(6):
            sequence = [(operations[k], factors[i, k].item()) for k in order[i].tolist()]
            sequence.insert((i + first) % 4, (TF.adjust_hue, hue[i].item()))
            x = floats[i]
            for operation, value in sequence:
                x = operation(x, value)
            torch.testing.assert_close(out[i], x, rtol=0, atol=2e-4)


def test_grey_and_normalise_and_blur_are_torchvisions(floats):
    expected = TF.rgb_to_grayscale(floats, num_output_channels=1)
    torch.testing.assert_close(grey(floats), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(normalise(floats), TF.normalize(floats, MEAN, STD))
    sigma = torch.tensor([0.0, 0.1, 0.5, 1.0, 1.5, 2.0])
    out = gaussian_blur(floats, sigma, reach=4)
    assert torch.equal(out[0], floats[0])
    for i in range(1, 6):
        expected = TF.gaussian_blur(floats[i], [9, 9], [sigma[i].item()] * 2)
        torch.testing.assert_close(out[i], expected, rtol=0, atol=1e-5)


def some_boxes(aspect, size, smallest):
    draw = draws(1, len(aspect), "cpu").uniform("crop", 2 * CROP_TRIES + 2)
    return crop_boxes(draw, aspect, size, (smallest, 1.0), (3 / 4, 4 / 3))


def test_crop_boxes_have_torchvisions_distribution():
    ours = some_boxes(torch.ones(4000), 32, 0.2)
    torch.manual_seed(0)
    crop = v2.RandomResizedCrop(32, scale=(0.2, 1.0))
    theirs = [crop.make_params([torch.zeros(3, 32, 32)]) for _ in range(4000)]
    theirs = torch.tensor([[p["top"], p["left"], p["height"], p["width"]] for p in theirs]).float()
    assert (ours[:, 0] + ours[:, 2]).max() <= 32
    assert (ours[:, 1] + ours[:, 3]).max() <= 32
    assert ours.min() >= 0
    torch.testing.assert_close(ours.mean(0), theirs.mean(0), rtol=0, atol=0.4)
    torch.testing.assert_close(ours.std(0), theirs.std(0), rtol=0, atol=0.3)
    for q in (0.05, 0.5, 0.95):
        torch.testing.assert_close(ours.quantile(q, 0), theirs.quantile(q, 0), rtol=0, atol=1.01)


def test_crops_of_a_wide_picture_have_true_shapes():
    """Stored squashed, a picture of 2:1 must give crops whose true ratio lies in the allowed range."""
    aspect = torch.full((3000,), 2.0)
    boxes = some_boxes(aspect, 256, 0.2)
    ratio = boxes[:, 3] * 2 / boxes[:, 2]
    assert ratio.min() > 3 / 4 - 0.03
    assert ratio.max() < 4 / 3 + 0.03
    # an extreme picture where no try fits falls back to the central crop of an allowed ratio
    boxes = some_boxes(torch.full((50,), 20.0), 256, 0.9)
    torch.testing.assert_close(boxes[:, 3] * 20 / boxes[:, 2], torch.full((50,), 4 / 3), rtol=0.05, atol=0)
    assert (boxes[:, 1] + boxes[:, 3] / 2 - 128).abs().max() <= 1


@pytest.mark.parametrize("aspect", [0.001, 1 / 90, 90, 300, 5000])
@pytest.mark.parametrize("size", [37, 64, 256])
def test_strips_stay_finite(aspect, size):
    picture = torch.randint(0, 255, (4, 3, size, size), dtype=torch.uint8)
    aspects = torch.full((4,), float(aspect))
    assert Augment(32)(picture, aspects, draws(0, 4, "cpu")).isfinite().all()
    assert central_crop(picture, aspects, 32).isfinite().all()


def test_evaluation_crop_is_the_central_true_square(pictures):
    """A 2:1 picture squashed to a square: the central square of the true picture is its middle half."""
    out = central_crop(pictures, torch.full((6,), 2.0), 40)
    expected = TF.resized_crop(pictures.float() / 255, 0, 10, 40, 20, [40, 40], antialias=True)
    torch.testing.assert_close(out, normalise(expected), rtol=0, atol=1e-4)


def test_whole_pipeline_matches_torchvision_in_distribution(pictures):
    """Means, spreads and saturation of many views of one picture."""
    count = 3000
    many = pictures[:1].expand(count, -1, -1, -1)
    ours = Augment(32)(many, torch.ones(count), draws(3, count, "cpu"))
    torch.manual_seed(0)
    reference = v2.Compose(
        [
            v2.RandomResizedCrop(32, scale=(0.2, 1.0)),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            v2.RandomGrayscale(0.2),
            v2.Normalize(MEAN, STD),
        ]
    )
    picture = pictures[0].float() / 255
    theirs = torch.stack([reference(picture) for _ in range(count)])

    def colours(x):
        return x * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)

    def statistics(x):
        x = colours(x)
        saturation = (x.amax(1) - x.amin(1)) / x.amax(1).clamp(min=1e-3)
        per_image = [x.mean((2, 3)), x.std((2, 3)), saturation.mean((1, 2))[:, None]]
        table = torch.cat(per_image, 1)  # [count, 7]
        return torch.stack([table.mean(0), table.std(0)])

    torch.testing.assert_close(statistics(ours), statistics(theirs), rtol=0.05, atol=0.01)
    grey_images = colours(ours).std(1).amax((1, 2)) < 1e-4
    assert grey_images.float().mean().item() == pytest.approx(0.2, abs=0.03)


def test_half_of_the_images_are_mirrored_and_hues_turn_both_ways():
    """What means and spreads do not show: a picture that is red on its left, and the hues it comes out with."""
    count = 1000
    picture = torch.full((count, 3, 16, 16), 50, dtype=torch.uint8)  # dull enough that no jitter reaches black or white
    picture[:, 0] = 80
    picture[:, 0, :, :8] = 120
    out = Augment(16, crop_scale=1.0, jitter_probability=1.0, grey_probability=0.0)(
        picture, torch.ones(count), draws(1, count, "cpu")
    )
    x = out * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    mirrored = x[:, 0, :, 8:].mean((1, 2)) > x[:, 0, :, :8].mean((1, 2))
    assert mirrored.float().mean().item() == pytest.approx(0.5, abs=0.06)
    _, green, blue = x.mean((2, 3)).unbind(1)
    turn = (green - blue) / (x.amax(1) - x.amin(1)).mean((1, 2)) / 6  # of the colour circle, from red
    assert turn.min().item() == pytest.approx(-0.1, abs=0.002)
    assert turn.max().item() == pytest.approx(0.1, abs=0.002)


def test_images_of_a_batch_draw_differently(pictures):
    same = pictures[:1].expand(6, -1, -1, -1)
    out = Augment(32)(same, torch.ones(6), draws(0, 6, "cpu"))
    assert all(not torch.equal(out[0], out[i]) for i in range(1, 6))
    again = Augment(32)(same, torch.ones(6), draws(0, 6, "cpu"))
    assert torch.equal(out, again)
    other_view = Augment(32)(same, torch.ones(6), draws(0, 6, "cpu"), view="second")
    assert not torch.equal(out, other_view)


@pytest.mark.parametrize("each", [False, True], ids=["batch", "image"])
def test_cutmix_pastes_the_partner_and_weighs_it(each):
    x = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 3, 16, 16).contiguous()
    cutmix = CutMix(0.5, each=each)
    weights = []
    for key in range(200):
        mixed, partner, mix = cutmix(x, draws(key, 5, "cpu"))
        assert mix.shape == ((5,) if each else ())
        assert partner.tolist() == [1, 2, 3, 4, 0]
        pasted = (mixed == partner.view(5, 1, 1, 1)).float().mean((1, 2, 3))
        torch.testing.assert_close(pasted, (1 - mix).expand(5))
        assert torch.equal((mixed == x) | (mixed == partner.view(5, 1, 1, 1)), torch.ones_like(x, dtype=torch.bool))
        weights.append(mix.expand(5))
    weights = torch.stack(weights)
    assert weights.min() >= 0.5  # the base image leads
    assert weights[:, 0].std() > 0.1
    assert (weights.std(1).mean() > 0.05) == each  # images of a batch are mixed each in its own way, or all alike
    assert CutMix(0.0)(x, draws(0, 5, "cpu")) == (x, None, 1.0)


def test_beta_quantiles():
    quantiles = beta_quantiles(0.5)
    u = torch.linspace(0, 1, len(quantiles), dtype=torch.float64)
    torch.testing.assert_close(quantiles, (torch.pi * u / 2).sin().square().float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(beta_quantiles(1.0), u.float(), rtol=0, atol=1e-6)
    for alpha in (0.001, 0.01, 0.1, 0.4, 3.0):  # small ones lie almost wholly at the two ends
        quantiles = beta_quantiles(alpha).double()
        assert (quantiles.diff() >= 0).all()
        variance = torch.trapezoid((quantiles - 0.5).square(), dx=1 / 1024).item()
        assert variance == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=3e-3)
