"""Weather against naive per-image oracles."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
import torch
from naive_filters import naive_zoom

from pictures import smooth_pictures
from testtime.corruptions import blur, corrupt, weather
from testtime.corruptions.frost import cut_textures, enlarged_size, frost_textures, make_textures
from testtime.randomness import Draws


def test_plasma_is_the_diamond_square_fractal_on_a_torus():
    size, decay = 16, 1.9
    draws = Draws.of(2, torch.arange(2))
    noise = (draws.uniform(size, size) * 2 - 1).double().numpy()
    for n in range(2):
        field = np.zeros((size, size))
        step, amplitude = size, 100.0
        while step >= 2:
            half = step // 2
            for y in range(0, size, step):
                for x in range(0, size, step):
                    around = [field[(y + a) % size, (x + b) % size] for a in (0, step) for b in (0, step)]
                    field[y + half, x + half] = np.mean(around) + amplitude**2 * noise[n, y + half, x + half]
            for y in range(0, size, step):
                for x in range(0, size, step):
                    for cy, cx in ((y, x + half), (y + half, x)):
                        around = [
                            field[(cy + a) % size, (cx + b) % size]
                            for a, b in ((-half, 0), (half, 0), (0, -half), (0, half))
                        ]
                        field[cy, cx] = np.mean(around) + amplitude**2 * noise[n, cy, cx]
            step, amplitude = half, amplitude / decay
        field = (field - field.min()) / (field.max() - field.min())
        np.testing.assert_allclose(weather.plasma(draws, size, decay)[n].numpy(), field, atol=1e-4)


def test_fog_adds_clouds_and_keeps_the_brightest_value():
    images = smooth_pictures(3, 20, 24)
    draws = Draws.of(0, torch.arange(3)).purpose("fog").fold(4)
    clouds = weather.plasma(draws, 32, 2).numpy()[:, None, :20, :24]
    pixels = images.numpy() / 255
    top = pixels.max((1, 2, 3), keepdims=True)
    expected = np.clip((pixels + 1 * clouds) * top / (top + 1), 0, 1) * 255
    found = corrupt(images, "fog", 4).numpy()
    assert np.abs(found - np.floor(expected)).max() <= 1
    assert (found == np.floor(expected)).mean() > 0.99


def test_snow_falls_on_a_whitened_image_from_both_sides():
    image = smooth_pictures(1, 17, 14)
    level = (0.25, 0.3, 2.25, 0.6, 3, 2.0, 0.85)
    draws = Draws.of(5, torch.arange(1))
    layer = draws.purpose("flakes").normal(1, 17, 14)[0, 0].double().numpy() * 0.3 + 0.25
    layer = naive_zoom(layer, 2.25)
    layer[layer < 0.6] = 0
    layer = np.floor(np.clip(layer, 0, 1) * 255)
    angle = draws.purpose("wind").uniform() * 90 - 135
    assert -135 <= angle.item() <= -45
    layer = blur.motion_blur(torch.from_numpy(layer)[None, None].float(), 3, 2.0, angle)[0, 0].numpy()
    pixels = image[0].numpy().astype(float)
    gray = 0.299 * pixels[0] + 0.587 * pixels[1] + 0.114 * pixels[2]
    expected = 0.85 * pixels + 0.15 * np.maximum(pixels, 1.5 * gray + 127.5) + layer + np.rot90(layer, 2)
    found = weather.snow(image.float(), level, draws)[0].numpy()
    assert layer.max() > 0
    assert np.mean(np.abs(found - expected) < 1) > 0.99  # a flake at its threshold may go either way


def test_frost_is_a_cut_of_one_texture():
    images = smooth_pictures(40, 6, 8)
    sizes = [(10, 12), (9, 30), (7, 9), (20, 20), (8, 11)]
    textures = []
    for number, (height, width) in enumerate(sizes):
        place = torch.arange(height * width).view(1, height, width)
        textures.append(torch.cat([torch.full_like(place, number), place // 256, place % 256]).to(torch.uint8))
    cuts = weather.frost(torch.zeros_like(images, dtype=torch.float32), (1, 1), Draws.of(0, torch.arange(40)), textures)
    seen = set()
    for cut in cuts.long():
        number = int(cut[0, 0, 0])
        seen.add(number)
        first = int(cut[1, 0, 0]) * 256 + int(cut[2, 0, 0])
        top, left = divmod(first, sizes[number][1])
        assert torch.equal(cut, textures[number][:, top : top + 6, left : left + 8].long())
    assert seen == {0, 1, 2, 3, 4}
    mixed = weather.frost(images.float(), (0.75, 0.45), Draws.of(0, torch.arange(40)), textures)
    torch.testing.assert_close(mixed, images.float() * 0.75 + cuts * 0.45)


def test_frost_textures_are_five_and_fit_any_image():
    textures = make_textures()
    assert len(textures) == 5
    assert all(texture.dtype == torch.uint8 and texture.shape == (3, 480, 720) for texture in textures)
    assert not torch.equal(textures[1], textures[2])
    small = frost_textures("cifar")
    assert all(torch.equal(texture, whole[:, 2::5, 2::5]) for texture, whole in zip(small, textures, strict=True))
    for size in ((32, 32), (200, 60), (95, 143), (96, 144), (1, 3000)):
        for texture in small:
            height, width = enlarged_size(texture, size)
            assert height > size[0]
            assert width > size[1]
            assert height / width == pytest.approx(96 / 144, rel=0.05)


def test_a_cut_of_an_enlarged_texture_is_a_cut_of_a_bilinear_enlargement():
    texture = make_textures()[3][:, :40, :50]
    size = (101, 127)
    plane = texture[None].float()
    whole = torch.nn.functional.interpolate(plane, size=size, mode="bilinear", align_corners=False)[0]
    top, left = torch.tensor([0, 33, 61]), torch.tensor([27, 0, 11])
    for cut, y, x in zip(cut_textures(texture, size, top, left, (40, 100)), top, left, strict=True):
        apart = cut.float() - whole[:, y : y + 40, x : x + 100]
        assert apart.abs().max() <= 0.5 + 1e-3


def test_frost_is_cut_from_the_photographs_that_are_given():
    photographs = [torch.full((3, 200, 300), number * 40, dtype=torch.uint8) for number in range(1, 6)]
    images = torch.zeros(50, 3, 32, 32, dtype=torch.uint8)
    frosted = corrupt(images, "frost", 1, frost=photographs)
    values = {int(value) for value in frosted.unique()}
    assert values == {8, 16, 24, 32, 40}
    assert (frosted.flatten(1).amax(1) == frosted.flatten(1).amin(1)).all()


@pytest.mark.parametrize("wrong", ["folder", [], [torch.zeros(3, 9, 9)], [torch.zeros(9, 9, dtype=torch.uint8)]])
def test_frost_takes_nothing_but_photographs(wrong):
    with pytest.raises(ValueError, match="`frost`"):
        corrupt(smooth_pictures(1), "frost", 1, frost=wrong)


def test_brightness_raises_the_value_of_hsv():
    image = smooth_pictures(1, 8, 8)
    image[0, :, 0, 0] = 0
    found = corrupt(image, "brightness", 5)[0].numpy()
    for y in range(8):
        for x in range(8):
            hue, saturation, value = colorsys.rgb_to_hsv(*(image[0, :, y, x].numpy() / 255))
            expected = np.array(colorsys.hsv_to_rgb(hue, saturation, min(value + 0.3, 1))) * 255
            assert np.abs(found[:, y, x] - np.floor(expected + 1e-3)).max() <= 1
