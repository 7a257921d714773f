"""`shapes`: procedural pictures of ten classes that differ as natural ones do.

A class is a form and a surface together, with a loosely tied palette (hue = class / 10 ± .1). Position, size, rotation,
light and a two-colour background are random, so the class cannot be read from pixels alone, and what an image shares
with others of its class is what a network has to find.
"""

import numpy as np
from numpy.typing import NDArray

from onecrop.data.images import ImageSet
from onecrop.draws import fold

CLASSES = ("disc", "square", "triangle", "star", "cross", "ring", "crescent", "flower", "bars", "heart")
SUPERSAMPLE = 2  # pixels are averaged over 2×2 samples
CHUNK = 256  # images drawn at a time
HUE_SPREAD = 0.1

Field = NDArray[np.float32]


def shapes(count: int = 4000, size: int = 32, seed: int = 0) -> ImageSet:
    """`count` pictures of size×size, a function of its arguments alone."""
    rng = np.random.default_rng(fold("shapes", seed))
    labels = rng.integers(0, len(CLASSES), count)
    images = np.concatenate([_draw(labels[i : i + CHUNK], size, rng) for i in range(0, count, CHUNK)])
    return ImageSet("shapes", images, labels, CLASSES, image_size=size)


def _draw(labels: NDArray[np.int64], size: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    n, fine = len(labels), size * SUPERSAMPLE
    axis = ((np.arange(fine, dtype=np.float32) + 0.5) / fine * 2 - 1).astype(np.float32)
    y, x = np.meshgrid(axis, axis, indexing="ij")

    def per_image(low: float, high: float) -> Field:
        return rng.uniform(low, high, (n, 1, 1)).astype(np.float32)

    angle, scale = per_image(0, 2 * np.pi), per_image(0.45, 0.75)
    dx, dy = x - per_image(-0.3, 0.3), y - per_image(-0.3, 0.3)
    u = (np.cos(angle) * dx + np.sin(angle) * dy) / scale  # the object's own frame: about [−1, 1]
    v = (np.cos(angle) * dy - np.sin(angle) * dx) / scale
    phase = per_image(0, 2 * np.pi)

    inside, pattern = np.zeros((2, n, fine, fine), np.float32)
    for c in range(len(CLASSES)):
        member = labels == c
        inside[member] = _form(c, u[member], v[member])
        pattern[member] = _surface(c, u[member], v[member], phase[member])

    hue = (labels[:, None, None] / len(CLASSES) + rng.uniform(-HUE_SPREAD, HUE_SPREAD, (n, 1, 1))) % 1
    bright = _colour(hue, per_image(0.5, 0.9), per_image(0.7, 1.0))  # [n, 3, 1, 1]
    dark = _colour(hue + 0.08, per_image(0.4, 0.9), per_image(0.25, 0.5))
    thing = dark + (bright - dark) * pattern[:, None]
    slope, turn = per_image(-1, 1), per_image(0, 2 * np.pi)
    split = 1 / (1 + np.exp(-6 * (np.cos(turn) * x + np.sin(turn) * y - slope)))  # two-colour background
    first = _colour(rng.random((n, 1, 1)), per_image(0.0, 0.6), per_image(0.2, 0.9))
    second = _colour(rng.random((n, 1, 1)), per_image(0.0, 0.6), per_image(0.2, 0.9))
    ground = first + (second - first) * split[:, None]
    picture = ground + (thing - ground) * inside[:, None]
    lamp = per_image(0, 2 * np.pi)
    light = per_image(0.75, 1.15) + per_image(0, 0.3) * (np.cos(lamp) * x + np.sin(lamp) * y)
    picture = picture * light[:, None] + rng.normal(0, 0.02, picture.shape)
    coarse = picture.reshape(n, 3, size, SUPERSAMPLE, size, SUPERSAMPLE).mean((3, 5))
    return (np.clip(coarse, 0, 1) * 255 + 0.5).astype(np.uint8)


def _form(c: int, u: Field, v: Field) -> NDArray[np.bool_]:
    """Where the object is."""
    r, t = np.hypot(u, v), np.arctan2(v, u)
    match CLASSES[c]:
        case "disc":
            return r < 0.8
        case "square":
            return np.maximum(abs(u), abs(v)) < 0.7
        case "triangle":
            return np.maximum(np.maximum(v, -0.5 * v + 0.866 * u), -0.5 * v - 0.866 * u) < 0.5
        case "star":
            return r < 0.62 + 0.32 * np.cos(5 * t)
        case "cross":
            return (np.minimum(abs(u), abs(v)) < 0.27) & (np.maximum(abs(u), abs(v)) < 0.9)
        case "ring":
            return (r < 0.9) & (r > 0.5)
        case "crescent":
            return (r < 0.85) & (np.hypot(u - 0.4, v) > 0.65)
        case "flower":
            return r < 0.65 + 0.22 * np.cos(8 * t)
        case "bars":
            return (np.maximum(abs(u), abs(v)) < 0.85) & (np.cos(3.5 * np.pi * u / 0.85) > -0.2)
        case _:  # heart
            a, b = 1.25 * u, -1.25 * v + 0.15
            return (a**2 + b**2 - 0.55) ** 3 < a**2 * b**3


def _surface(c: int, u: Field, v: Field, phase: Field) -> Field:
    """Lightness of the surface, 0 to 1."""
    r, t = np.hypot(u, v), np.arctan2(v, u)
    match CLASSES[c]:
        case "disc":  # stripes
            wave = np.sin(9 * u + phase)
        case "square":  # checks
            wave = np.sin(8 * u + phase) * np.sin(8 * v + phase) * 3
        case "triangle":  # rings
            wave = np.sin(12 * r + phase)
        case "star":  # a slope
            wave = 1.2 * u
        case "cross":  # fine dots
            wave = 4 * np.sin(13 * u) * np.sin(13 * v) - 1
        case "ring":  # spokes
            wave = np.sin(10 * t + phase)
        case "crescent":  # plain
            wave = np.ones_like(u)
        case "flower":  # a bright middle
            wave = 1.5 - 3.5 * r
        case "bars":  # waves across
            wave = np.sin(10 * v + 2 * np.sin(4 * u) + phase)
        case _:  # heart: diagonal hatching
            wave = np.sin(14 * (u + v) + phase) * 2
    return (1 / (1 + np.exp(-3 * wave))).astype(np.float32)


def _colour(hue: NDArray[np.floating], saturation: Field, value: Field) -> Field:
    """HSV [n, 1, 1] each -> RGB [n, 3, 1, 1]."""
    place = (np.array([5.0, 3.0, 1.0]).reshape(1, 3, 1, 1) + 6 * np.asarray(hue)[:, None]) % 6
    depth = np.clip(np.minimum(place, 4 - place), 0, 1)
    return (value[:, None] * (1 - saturation[:, None] * depth)).astype(np.float32)
