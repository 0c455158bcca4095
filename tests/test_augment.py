"""Augmentations against naive versions of one image at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pictures import pictures

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

from testtime import augment
from testtime.augment import AugMix, CropFlip, ResizedCropFlip
from testtime.randomness import Draws


def all_crops(image: Tensor, padding: int, flip: bool) -> dict[tuple[int, int, bool], Tensor]:
    """Every result that pad, slice and flip can give."""
    height, width = image.shape[-2:]
    padded = torch.zeros(len(image), height + 2 * padding, width + 2 * padding, dtype=image.dtype)
    padded[:, padding : padding + height, padding : padding + width] = image
    crops = {}
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = padded[:, top : top + height, left : left + width]
            crops[top, left, False] = crop
            if flip:
                crops[top, left, True] = crop.flip(-1)
    return crops


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (5, 9), (12, 5)])
@pytest.mark.parametrize(("padding", "flip"), [(4, True), (2, True), (1, False), (0, True), (0, False)])
def test_crop_flip_is_pad_slice_and_flip(height: int, width: int, padding: int, flip: bool, dtype: torch.dtype) -> None:
    images = pictures(3, 3, height, width, seed=2, dtype=dtype)
    copies = CropFlip(padding, flip)(images, Draws.of(0, torch.arange(3)).copies(6))
    assert copies.shape == (3, 6, 3, height, width)
    assert copies.dtype == dtype
    for image, group in zip(images, copies, strict=True):
        possible = all_crops(image, padding, flip)
        for copy in group:
            assert sum(torch.equal(copy, crop) for crop in possible.values()) == 1


def test_every_crop_and_flip_is_equally_likely() -> None:
    image = pictures(1, 3, 6, 6, seed=2, dtype=torch.uint8)
    copies = CropFlip(padding=1)(image, Draws.of(5, torch.arange(1)).copies(3600))[0]
    possible = torch.stack(list(all_crops(image[0], 1, True).values()))  # 18 of them
    counts = (copies[:, None] == possible).flatten(2).all(2).sum(0)
    assert counts.sum() == 3600
    assert float(((counts - 200) ** 2 / 200).sum()) < 46.6  # chi-square of 17 degrees, once in ten thousand


@pytest.mark.parametrize("kind", [CropFlip(), ResizedCropFlip(), AugMix(10.0)])
def test_a_copy_depends_on_its_image_and_key_alone(kind: augment.Augment) -> None:
    images, draws = pictures(4, 3, 8, 8, seed=2), Draws.of(1, torch.arange(4)).copies(5)
    together = kind(images, draws)
    before = images.clone()
    for n in range(4):
        for k in range(5):
            alone = kind(images[n : n + 1], Draws(draws.keys[n : n + 1, k : k + 1]))
            assert torch.allclose(alone[0, 0], together[n, k], atol=1e-6)
    assert not torch.equal(together[:, 0], together[:, 1])
    assert torch.equal(images, before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("size", [None, 6, 20])
@pytest.mark.parametrize(("height", "width"), [(12, 12), (9, 17), (16, 5)])
def test_resized_crop_is_crop_and_interpolate(height: int, width: int, size: int | None, dtype: torch.dtype) -> None:
    images = pictures(3, 3, height, width, seed=2, dtype=dtype)
    draws = Draws.of(4, torch.arange(3)).copies(8)
    kind = ResizedCropFlip(size=size, scale=(0.1, 1.0))
    copies = kind(images, draws)
    shape = (size or height, size or width)
    assert copies.shape == (3, 8, 3, *shape)
    boxes = torch.stack(kind.boxes(height, width, draws), dim=-1)
    flips = set()
    for n in range(3):
        for k in range(8):
            top, left, tall, wide = boxes[n, k].tolist()
            crop = images[n : n + 1, :, top : top + tall, left : left + wide].float()
            crop = crop / 255 if dtype == torch.uint8 else crop
            resized = F.interpolate(crop, shape, mode="bilinear", antialias=True)[0]
            upright = torch.allclose(copies[n, k], resized, atol=1e-5)
            flipped = torch.allclose(copies[n, k], resized.flip(-1), atol=1e-5)
            assert upright != flipped
            flips.add(flipped)
    assert flips == {True, False}


def test_without_flip_nothing_is_flipped() -> None:
    images, draws = pictures(2, 3, 10, 10, seed=2), Draws.of(0, torch.arange(2)).copies(10)
    whole = ResizedCropFlip(scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=False)(images, draws)
    assert torch.allclose(whole, images[:, None].expand_as(whole), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_resized_crops_take_floats_of_any_precision(dtype: torch.dtype) -> None:
    images, draws = pictures(2, 3, 8, 8, seed=2), Draws.of(0, torch.arange(2)).copies(3)
    copies = ResizedCropFlip()(images.to(dtype), draws)
    assert torch.allclose(copies.float(), ResizedCropFlip()(images, draws), atol=1e-2)


ranges = st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(lambda pair: (min(pair), max(pair)))
ratios = st.tuples(st.floats(0.2, 5), st.floats(0.2, 5)).map(lambda pair: (min(pair), max(pair)))


@given(st.integers(8, 40), st.integers(8, 40), ranges, ratios, st.integers(0, 100))
def test_boxes_lie_inside_and_have_an_allowed_area_and_shape(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], seed: int
) -> None:
    draws = Draws.of(seed, torch.arange(3)).copies(20)
    boxes = torch.stack(ResizedCropFlip(scale=scale, ratio=ratio).boxes(height, width, draws), dim=-1)
    assert boxes.shape == (3, 20, 4)
    for top, left, tall, wide in boxes.flatten(0, 1).tolist():
        assert top >= 0
        assert top + tall <= height
        assert left >= 0
        assert left + wide <= width
        assert tall >= 1
        assert wide >= 1
        # Both sides are rounded to whole pixels, so the exact box has sides at most half a pixel away.
        smallest, largest = (tall - 0.51) * (wide - 0.51), (tall + 0.51) * (wide + 0.51)
        allowed_area = smallest <= scale[1] * height * width and largest >= scale[0] * height * width
        flattest, tallest = (wide + 0.51) / max(tall - 0.51, 1e-9), (wide - 0.51) / (tall + 0.51)
        allowed_shape = flattest >= ratio[0] and tallest <= ratio[1]
        fallback = (tall == height or wide == width) and abs(2 * top - (height - tall)) <= 1
        assert allowed_shape
        assert allowed_area or fallback


def test_where_nothing_fits_the_largest_central_box_is_taken() -> None:
    """A flat image, tall boxes only: no try of half the area fits."""
    kind = ResizedCropFlip(scale=(0.5, 1.0), ratio=(0.5, 0.5))
    top, left, tall, wide = kind.boxes(4, 40, Draws.of(0, torch.arange(2)).copies(3))
    assert set(zip(*(t.flatten().tolist() for t in (top, left, tall, wide)), strict=True)) == {(0, 19, 4, 2)}


@pytest.mark.parametrize(("height", "width", "ratio"), [(1, 30, 0.3), (30, 1, 4.0)])
def test_the_smallest_images_still_have_boxes_of_a_pixel(height: int, width: int, ratio: float) -> None:
    images, draws = pictures(1, 3, height, width, seed=2), Draws.of(0, torch.arange(1)).copies(5)
    kind = ResizedCropFlip(scale=(0.9, 1.0), ratio=(ratio, ratio))
    _, _, tall, wide = kind.boxes(height, width, draws)
    assert int(tall.min()) >= 1
    assert int(wide.min()) >= 1
    assert kind(images, draws).isfinite().all()


def test_boxes_reach_every_corner() -> None:
    top, left, tall, wide = ResizedCropFlip(scale=(0.2, 0.3)).boxes(10, 10, Draws.of(0, torch.arange(500)).copies(1))
    assert (int(top.min()), int(left.min())) == (0, 0)
    assert (int((top + tall).max()), int((left + wide).max())) == (10, 10)


@pytest.mark.parametrize(
    ("specification", "expected"),
    [
        ({"name": "crop-flip"}, CropFlip()),
        ({"name": "crop-flip", "padding": 2, "flip": False}, CropFlip(2, False)),
        ({"name": "resized-crop-flip", "size": 9, "scale": [0.5, 1.0]}, ResizedCropFlip(9, (0.5, 1.0))),
    ],
)
def test_make_builds_what_a_card_names(specification: dict[str, object], expected: augment.Augment) -> None:
    before = dict(specification)
    assert augment.make(specification) == expected
    assert specification == before


@pytest.mark.parametrize(
    ("specification", "said"),
    [
        ({"name": "mixup"}, "'mixup'"),
        ({}, "None"),
        ({"name": "crop-flip", "padding": -1}, r"`padding`.*-1"),
        ({"name": "crop-flip", "padding": 1.5}, r"`padding`.*1\.5"),
        ({"name": "crop-flip", "colour": 1}, "colour"),
        ({"name": "crop-flip", "flip": "no"}, r"`flip`.*'no'"),
        ({"name": "resized-crop-flip", "scale": 1}, "`scale`"),
        ({"name": "resized-crop-flip", "size": 0}, r"`size`.*0"),
        ({"name": "resized-crop-flip", "scale": [1.0, 0.5]}, "`scale`"),
        ({"name": "resized-crop-flip", "ratio": [0.0, 0.5]}, "`ratio`"),
    ],
)
def test_make_refuses_what_it_does_not_know(specification: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        augment.make(specification)


def read_bilinear(image: Tensor, x: float, y: float) -> Tensor:
    """The value between pixels, black outside the image, of a position in pixels."""
    left, top = math.floor(x), math.floor(y)
    value = torch.zeros(len(image))
    for row, column in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
        if 0 <= row < image.shape[1] and 0 <= column < image.shape[2]:
            value += image[:, row, column] * (1 - abs(x - column)) * (1 - abs(y - row))
    return value


def process_naively(image: Tensor, operation: int, level: float, negative: bool) -> Tensor:
    """One operation of AugMix on one image `(C, H, W)`, pixel by pixel."""
    height, width = image.shape[1:]
    signed = -level if negative else level
    result = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            x, y = column - (width - 1) / 2, row - (height - 1) / 2  # from the centre
            angle = math.radians(30 * signed)
            from_x, from_y = {
                0: (x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)),
                1: (x + 0.3 * signed * y, y),
                2: (x, y + 0.3 * signed * x),
                3: (x + signed * width / 3, y),
                4: (x, y + signed * height / 3),
            }.get(operation, (x, y))
            pixel = read_bilinear(image, from_x + (width - 1) / 2, from_y + (height - 1) / 2)
            if operation == 5:
                width_of_step = 2 ** (8 - (4 - int(4 * level)))
                pixel = torch.tensor([int(value * 255) // width_of_step * width_of_step / 255 for value in pixel])
            if operation == 6:
                pixel = torch.where(pixel >= 1 - level, 1 - pixel, pixel)
            result[:, row, column] = pixel
    if operation == 7:
        for channel in result:
            if channel.max() > channel.min():
                channel.copy_((channel - channel.min()) / (channel.max() - channel.min()))
    return result


@pytest.mark.parametrize(("height", "width"), [(6, 6), (5, 8)])
def test_the_operations_of_augmix_are_those_of_one_image(height: int, width: int) -> None:
    images = pictures(64, 3, height, width, seed=3, dtype=torch.float32)
    images[0] = 0.4  # nothing to stretch
    draws = Draws.of(2, torch.arange(64))
    processed = AugMix(10.0).process(images, draws)
    operations = draws.purpose("operation").integers(8).tolist()
    levels = ((0.1 + draws.purpose("level").uniform() * 9.9) / 10).tolist()
    signs = draws.purpose("sign").integers(2).tolist()
    assert set(operations) == set(range(8))
    for image, found, operation, level, sign in zip(images, processed, operations, levels, signs, strict=True):
        expected = process_naively(image, operation, level, bool(sign))
        close = (found - expected).abs().amax(0) < 1e-4
        assert close.float().mean() > 0.97, operation  # rounding may cross a step of posterization
        if operation != 5:
            assert close.all(), operation


def test_augmix_mixes_an_image_with_processed_ones() -> None:
    images = pictures(4, 3, 8, 8, seed=3, dtype=torch.uint8)
    draws = Draws.of(2, torch.arange(4)).copies(50)
    mixed = AugMix(3.0)(images, draws)
    assert mixed.shape == (4, 50, 3, 8, 8)
    assert mixed.dtype == torch.float32
    assert mixed.min() >= 0
    assert mixed.max() <= 1 + 1e-6
    share = draws.purpose("augmix").purpose("share").uniform()
    distance = (mixed - images[:, None] / 255).abs().mean((2, 3, 4))
    assert (distance[share < 0.05] < 0.05).all()  # hardly changed where little is mixed in
    assert distance[share > 0.5].mean() > 3 * distance[share < 0.1].mean()
    plain = AugMix(0.1)(images, draws)  # nearly the identity, but for posterization and autocontrast
    assert (plain - images[:, None] / 255).abs().mean() < distance.mean()


@pytest.mark.parametrize("severity", [0.0, 11.0, float("nan"), "much"])
def test_augmix_refuses_another_severity(severity: object) -> None:
    with pytest.raises(ValueError, match="severity"):
        AugMix(severity)  # type: ignore[arg-type]
