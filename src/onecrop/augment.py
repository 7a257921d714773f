"""Augmentation of a whole batch on its device, one random draw an image.

Images arrive as uint8 squares [B, 3, R, R] with their true aspect ratio beside them and leave as normalised floats
[B, 3, S, S]. Each operation takes its parameters as tensors and equals torchvision's operation at those parameters;
the classes below draw the parameters.
"""

import math

import torch
from torch import Tensor, nn

from onecrop.distributed import ALONE, Group
from onecrop.draws import Draws

MEAN = (0.485, 0.456, 0.406)  # ImageNet's, for every data set: an exported backbone takes torchvision's transforms
STD = (0.229, 0.224, 0.225)
GREY = (0.2989, 0.587, 0.114)  # luma weights of torchvision
CROP_TRIES = 10  # as RandomResizedCrop


def crop_boxes(
    draw: Tensor, aspect: Tensor, size: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """RandomResizedCrop's boxes in pixels of the stored square -> [B, 4] (top, left, height, width).

    draw: uniform [B, 2·CROP_TRIES + 2]. Area and ratio are those of the true picture; the first of ten tries that fits
    is taken, else the largest central crop with an allowed ratio.
    """
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    area = scale[0] + (scale[1] - scale[0]) * draw[:, :CROP_TRIES]  # [B, 10] share of the picture
    shape = (log_low + (log_high - log_low) * draw[:, CROP_TRIES : 2 * CROP_TRIES]).exp()  # true width / height
    shape = shape / aspect[:, None]  # the same crop's width / height in the stored square
    width, height = (size * (area * shape).sqrt()).round(), (size * (area / shape).sqrt()).round()
    fits = (width <= size) & (height <= size) & (width > 0) & (height > 0)
    first = fits.int().argmax(dim=1, keepdim=True)  # 0 where none fits
    # central fall-back: the whole picture, cut to the allowed ratio
    allowed = (aspect.clamp(ratio[0], ratio[1]) / aspect)[:, None]
    full = torch.full_like(allowed, size)
    any_fits = fits.any(1, keepdim=True)
    width = torch.where(any_fits, width.gather(1, first), (full * allowed.clamp(max=1)).round().clamp(min=1))
    height = torch.where(any_fits, height.gather(1, first), (full / allowed.clamp(min=1)).round().clamp(min=1))
    free = torch.where(any_fits, draw[:, -2:], 0.5)  # position among the integer offsets
    top = (free[:, :1] * (size - height + 1)).floor()
    left = (free[:, 1:] * (size - width + 1)).floor()
    return torch.cat([top, left, height, width], dim=1)


def central_boxes(aspect: Tensor, size: int, share: float) -> Tensor:
    """The central true square, `share` of the shorter side long, in the stored square -> [B, 4]."""
    width = (size * share / aspect.clamp(min=1)).clamp(min=1)  # of a strip at least one stored pixel
    height = (size * share * aspect.clamp(max=1)).clamp(min=1)
    return torch.stack([(size - height) / 2, (size - width) / 2, height, width], dim=1)


def _resize_weights(start: Tensor, length: Tensor, stored: int, size: int) -> Tensor:
    """[B, size, stored]: antialiased bilinear weights that map pixels start … start+length to `size` pixels."""
    scale = (length / size)[:, None, None]
    pixel = torch.arange(stored, device=start.device) + 0.5 - start[:, None]  # [B, stored] centres inside the box
    centre = (torch.arange(size, device=start.device)[:, None] + 0.5) * scale  # [B, size, 1]
    weight = (1 - (pixel[:, None] - centre).abs() / scale.clamp(min=1)).clamp(min=0)
    inside = (pixel >= 0) & (pixel <= length[:, None])
    weight = weight * inside[:, None]
    return weight / weight.sum(-1, keepdim=True)


def resample(images: Tensor, boxes: Tensor, size: int, flip: Tensor | None = None) -> Tensor:
    """Crop `boxes` out of uint8 or float images and resize them to size×size, mirrored where `flip` -> [B, 3, S, S].

    Resizing is linear and separable, so a crop of any size is two batched matrix products: exact, antialiased, and of
    one shape for the whole batch.
    """
    batch, channels, stored, _ = images.shape
    pixels = images.to(torch.float32) / 255 if images.dtype == torch.uint8 else images
    rows = _resize_weights(boxes[:, 0], boxes[:, 2], stored, size).to(pixels.dtype)
    columns = _resize_weights(boxes[:, 1], boxes[:, 3], stored, size).to(pixels.dtype)
    if flip is not None:
        columns = torch.where(flip[:, None, None], columns.flip(1), columns)
    wide = pixels.reshape(batch, channels * stored, stored) @ columns.mT  # [B, 3R, S]
    wide = wide.view(batch, channels, stored, size).permute(0, 2, 1, 3).reshape(batch, stored, channels * size)
    return (rows @ wide).view(batch, size, channels, size).permute(0, 2, 1, 3)


def grey(x: Tensor) -> Tensor:
    """Luma -> [B, 1, S, S]."""
    return GREY[0] * x[:, 0:1] + GREY[1] * x[:, 1:2] + GREY[2] * x[:, 2:3]


def shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by `shift` [B] of the colour circle, through HSV."""
    value, low = x.amax(1), x.amin(1)
    chroma = value - low
    red, green, blue = x.unbind(1)
    safe = chroma.clamp(min=1e-12)
    sector = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    turned = sector + 6 * shift[:, None, None]  # in sectors of sixty degrees
    place = torch.remainder(torch.arange(5, 0, -2, device=x.device).view(3, 1, 1) + turned[:, None], 6)
    return value[:, None] - chroma[:, None] * torch.minimum(place, 4 - place).clamp(0, 1)


def blend(x: Tensor, factor: Tensor, which: Tensor) -> Tensor:
    """x ← clamp(f·x + (1−f)·t): t = 0 (which 0, brightness), mean luma (1, contrast) or luma (2, saturation)."""
    luma = grey(x)
    which, factor = which.view(-1, 1, 1, 1), factor.view(-1, 1, 1, 1)
    target = torch.where(which == 1, luma.mean((2, 3), keepdim=True), luma) * (which > 0)
    return (factor * x + (1 - factor) * target).clamp(0, 1)


def colour_jitter(x: Tensor, factors: Tensor, hue: Tensor, order: Tensor, first: int = 0) -> Tensor:
    """Brightness, contrast and saturation by `factors` [B, 3], in the order `order` [B, 3], and a turn of the hue.

    Turning the hue is the costly part and happens once an image: its place in the order is the image's place in the
    batch modulo four, which is random because the batch's order is.
    """
    x = x.clone()
    for turn in range(4):
        if turn:
            which = order[:, turn - 1]
            x = blend(x, factors.gather(1, which[:, None])[:, 0], which)
        begin = (turn - first) % 4
        x[begin::4] = shift_hue(x[begin::4], hue[begin::4])
    return x


def gaussian_blur(x: Tensor, sigma: Tensor, reach: int) -> Tensor:
    """Blur with a kernel of 2·reach + 1 pixels, sigma [B], mirrored edges; sigma 0 leaves the image as it is."""
    size = x.shape[-1]
    offset = torch.arange(-reach, reach + 1, device=x.device)
    kernel = torch.exp(-0.5 * (offset / sigma.clamp(min=1e-3)[:, None]) ** 2)  # [B, 2·reach + 1]
    kernel = kernel / kernel.sum(1, keepdim=True)
    source = torch.arange(size, device=x.device)[:, None] + offset  # [S, 2·reach + 1]
    source = source.abs()
    source = torch.where(source >= size, 2 * (size - 1) - source, source)
    band = torch.zeros(len(x), size, size, device=x.device, dtype=kernel.dtype)
    band.scatter_add_(2, source.expand(len(x), -1, -1), kernel[:, None].expand(-1, size, -1))
    band = band[:, None].to(x.dtype)
    return band @ x @ band.mT


def normalise(x: Tensor) -> Tensor:
    return torch.cat([(x[:, c : c + 1] - MEAN[c]) / STD[c] for c in range(3)], dim=1)


def central_crop(images: Tensor, aspect: Tensor, size: int) -> Tensor:
    """What evaluation sees: the central square, 7/8 of the shorter side for large images, all of it for small ones."""
    return normalise(resample(images, central_boxes(aspect, images.shape[-1], _central_share(size)), size))


def _central_share(size: int) -> float:
    return 0.875 if size > 64 else 1.0


def describe_central_crop(stored: int, size: int) -> str:
    """For result rows: what happened to a picture between its file and the network."""
    share = _central_share(size)
    part, side = ("7/8 of the central square" if share < 1 else "the central square"), round(stored * share)
    change = "as it is" if size == side else f"{'enlarged' if size > side else 'reduced'} to {size} px, linear"
    return f"stored at {stored} px; {part}, {change}"


class Augment(nn.Module):
    """One random crop an image, flipped and recoloured: the paper's augmentation for one view."""

    def __init__(
        self,
        size: int,
        crop_scale: float = 0.2,
        jitter: float = 0.4,
        jitter_probability: float = 0.8,
        grey_probability: float = 0.2,
        blur_probability: float = 0.0,
    ) -> None:
        super().__init__()
        self.size, self.scale, self.ratio = size, (crop_scale, 1.0), (3 / 4, 4 / 3)
        self.jitter, self.jitter_probability = jitter, jitter_probability
        self.grey_probability = grey_probability
        self.blur_probability = blur_probability
        self.reach = max(1, size // 20)  # the kernel spans a tenth of the image

    @torch.no_grad()
    def forward(self, images: Tensor, aspect: Tensor, draws: Draws, view: str = "view") -> Tensor:
        """-> [B, 3, S, S], normalised. `view` names the draw: two views of a batch use two names."""
        draw = draws.uniform(f"{view} crop", 2 * CROP_TRIES + 2)
        boxes = crop_boxes(draw, aspect, images.shape[-1], self.scale, self.ratio)
        return self.recolour(images, boxes, draws, view)

    @torch.no_grad()
    def recolour(self, images: Tensor, boxes: Tensor, draws: Draws, view: str) -> Tensor:
        """All but the choice of the crop: `boxes` cut out, flipped, jittered, greyed and blurred."""
        chance = draws.uniform(f"{view} chance", 4)
        x = resample(images, boxes, self.size, flip=chance[:, 0] < 0.5)
        if self.jitter_probability:
            on = (chance[:, 1:2] < self.jitter_probability).to(x.dtype)
            draw = draws.uniform(f"{view} jitter", 7)
            change = (2 * draw[:, :4] - 1) * self.jitter * on  # 0 leaves the image as it is
            # the paper's strengths: .4, .4, .4 and a quarter of that for the hue
            x = colour_jitter(x, 1 + change[:, :3], change[:, 3] / 4, draw[:, 4:].argsort(1), draws.first)
        if self.grey_probability:
            x = torch.where((chance[:, 2] < self.grey_probability).view(-1, 1, 1, 1), grey(x), x)
        if self.blur_probability:
            sigma = 0.1 + 1.9 * draws.uniform(f"{view} blur", 1)[:, 0]
            x = gaussian_blur(x, sigma * (chance[:, 3] < self.blur_probability), self.reach)
        return normalise(x)


class CutMix(nn.Module):
    """Paste a box of the next image into each image of the batch. λm ~ Beta(α, α), folded to ≥ ½: the base image leads.

    One box for the batch, as in the released code, or one for each image. The batch's order is random, so the next
    image is a random one, and its place is known on every process.
    """

    quantiles: Tensor

    def __init__(self, alpha: float, group: Group = ALONE, each: bool = False) -> None:
        super().__init__()
        self.alpha, self.group, self.each = alpha, group, each
        if alpha:
            self.register_buffer("quantiles", beta_quantiles(alpha), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, draws: Draws) -> tuple[Tensor, Tensor | None, Tensor | float]:
        """-> mixed images, place of each one's partner [B] in the whole batch, weight of the base image [] or [B]."""
        if not self.alpha:
            return x, None, 1.0
        size = x.shape[-1]
        # [1, 3], or [B, 3] of the whole batch: every process knows how all images are mixed
        draw = draws.whole().uniform("cutmix", 3) if self.each else draws.once("cutmix", 3)[None]
        position = draw[:, :1] * (len(self.quantiles) - 1)
        below = position.floor().long()  # never []: a tensor without dimensions as an index is read by the host
        share = torch.lerp(self.quantiles[below], self.quantiles[below + 1], position - below)
        share = torch.maximum(share, 1 - share)
        side = (size * (1 - share).sqrt()).floor()
        centre = (draw[:, 1:] * size).floor()
        start, end = (centre - side // 2).clamp(0, size), (centre + side // 2).clamp(0, size)  # [·, 2]
        mix = 1 - (end - start).prod(1) / size**2  # the true share, after the box was cut at the border
        if self.each:
            own = slice(draws.first, draws.first + draws.size)
            start, end = start[own], end[own]
        along = torch.arange(size, device=x.device)
        inside = (along >= start[..., None]) & (along < end[..., None])  # [·, 2, S]
        box = inside[:, 0, :, None] & inside[:, 1, None, :]  # [·, S, S]
        partner = torch.arange(draws.total, device=x.device).roll(-1)
        return torch.where(box[:, None], self.group.following(x), x), partner, mix if self.each else mix[0]


def beta_quantiles(alpha: float, count: int = 1025) -> Tensor:
    """Quantiles of Beta(α, α), by integration over x = sin²(t), where the density is that of sin(2t)^(2α − 1).

    It has a pole at each end where α < ½; over v ∝ t^(2α) it has none. The upper half mirrors the lower one.
    """
    power = max(1.0, 1 / (2 * alpha))  # t ∝ v^power
    v = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    double = v**power * (math.pi / 2)  # 2t
    mass = torch.sinc(double / math.pi) ** (2 * alpha - 1) * v ** (2 * alpha * power - 1)
    cumulative = mass.cumsum(0) - mass / 2
    wanted = torch.linspace(0, 1, count // 2 + 1, dtype=torch.float64) * mass.sum()
    at = torch.searchsorted(cumulative, wanted).clamp(1, len(v) - 1)
    part = (wanted - cumulative[at - 1]) / (cumulative[at] - cumulative[at - 1])
    place = (v[at - 1] + part.clamp(0, 1) * (v[at] - v[at - 1])) ** power * (math.pi / 4)
    lower = place.sin() ** 2
    lower[0], lower[-1] = 0, 0.5
    return torch.cat([lower, 1 - lower[:-1].flip(0)]).to(torch.float32)
