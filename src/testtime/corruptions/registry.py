"""The corruptions by name: `corrupt` for the published severities, `corrupt_noise` for any strength.

They are the fifteen of CIFAR-10-C and ImageNet-C (Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to
Common Corruptions and Perturbations", 2019) and their four extra ones, reimplemented as batched tensor code. The
corruption of an image depends only on (seed, sample index, corruption, severity).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from testtime.corruptions import blur, digital, noise, spatter, weather
from testtime.corruptions.frost import frost_textures
from testtime.randomness import Draws

Scale = Literal["auto", "cifar", "imagenet"]

CORRUPTIONS: tuple[str, ...] = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
"""The names in the order of the published tables."""

EXTRA: tuple[str, ...] = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""Four more, meant for choosing settings, not for reporting."""

SEVERITIES: tuple[int, ...] = (1, 2, 3, 4, 5)

PIXEL_LIMIT = 64_000_000
"""Maximum number of pixels of an image; below the number from which Pillow warns."""
SIDE_LIMIT = 65_500
"""Maximum side of an image in pixels, the limit of JPEG."""
LIMITS = f"at most {SIDE_LIMIT:,} pixels per side and {PIXEL_LIMIT:,} in total"

_LEVELS: dict[str, Mapping[str, Sequence[Any]]] = {
    **noise.LEVELS,
    "defocus_blur": blur.DEFOCUS,
    "glass_blur": blur.GLASS,
    "motion_blur": blur.MOTION,
    "zoom_blur": blur.ZOOM,
    "snow": weather.SNOW,
    "frost": weather.FROST,
    "fog": weather.FOG,
    "brightness": weather.BRIGHTNESS,
    "contrast": digital.CONTRAST,
    "elastic_transform": digital.ELASTIC,
    "pixelate": digital.PIXELATE,
    "jpeg_compression": digital.JPEG,
    "speckle_noise": noise.SPECKLE,
    "gaussian_blur": blur.GAUSSIAN,
    "spatter": spatter.SPATTER,
    "saturate": digital.SATURATE,
}

_DETERMINISTIC: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "defocus_blur": blur.defocus_blur,
    "zoom_blur": blur.zoom_blur,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
    "gaussian_blur": blur.gaussian_blur,
    "saturate": digital.saturate,
}
_RANDOM: dict[str, Callable[[Tensor, Any, Draws], Tensor]] = {
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.blur_motion,
    "snow": weather.snow,
    "fog": weather.fog,
    "speckle_noise": noise.speckle_noise,
    "spatter": spatter.spatter,
}

# Values processed at once: what fits the caches of a CPU, or keeps a GPU busy. Motion blur sorts images by direction
# and is faster with many.
_CPU_VALUES = 1 << 19
_CPU_VALUES_OF = {"motion_blur": 1 << 21, "snow": 1 << 21}
_GPU_VALUES = 1 << 25


def severity_level(name: str, severity: int, scale: Literal["cifar", "imagenet"]) -> Any:
    """Return the published parameters of a corruption: a number, or a tuple in the order that its function documents.

    Args:
        name: One of `CORRUPTIONS` or `EXTRA`.
        severity: 1 to 5.
        scale: "cifar" or "imagenet", the data set of the parameters.
    """
    _check_choice(name, severity)
    if scale not in ("cifar", "imagenet"):
        raise ValueError(f'`scale` must be "cifar" or "imagenet", got {scale!r}.')
    return _LEVELS[name][scale][severity - 1]


def resolve_scale(scale: Scale, height: int, width: int) -> Literal["cifar", "imagenet"]:
    """Resolve "auto": CIFAR's parameters below a short side of 64 pixels, ImageNet's otherwise.

    Args:
        scale: "auto", "cifar" or "imagenet".
        height: Height of the images in pixels.
        width: Width of the images in pixels.
    """
    if scale == "auto":
        return "cifar" if min(height, width) < 64 else "imagenet"
    if scale not in ("cifar", "imagenet"):
        raise ValueError(f'`scale` must be "auto", "cifar" or "imagenet", got {scale!r}.')
    return scale


def corrupt(
    images: Tensor,
    name: str,
    severity: int,
    *,
    seed: int = 0,
    samples: Tensor | None = None,
    scale: Scale = "auto",
    frost: Sequence[Tensor] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Corrupt a batch of images.

    Args:
        images: uint8, or float in [0, 1] (rounded to 8 bits), `(N, C, H, W)` with one channel or three, on any device.
        name: One of `CORRUPTIONS` or `EXTRA`.
        severity: 1 to 5.
        seed: Seed of the draws.
        samples: Sample indices, which the draws also depend on, integers `(N,)`; None: 0 to N - 1.
        scale: Parameters of "cifar" or "imagenet", or "auto" by the images' size (see `resolve_scale`).
        frost: Frost photographs, uint8 `(3, h, w)` each, as read by `testtime.data.read_frost`; None: procedural
            textures.
        chunk: Images processed at once, which bounds the additional memory; None: chosen by their size.

    Returns:
        uint8 of the same shape on the same device.

    Raises:
        ValueError: An argument is invalid, or the images are larger than `fits` allows.
        TypeError: The images are neither uint8 nor floating point.
    """
    result = torch.empty(images.shape, dtype=torch.uint8, device=images.device)
    for part, block in corrupt_chunks(
        images, name, severity, seed=seed, samples=samples, scale=scale, frost=frost, chunk=chunk
    ):
        result[part] = block
    return result


def corrupt_chunks(
    images: Tensor,
    name: str,
    severity: int,
    *,
    seed: int = 0,
    samples: Tensor | None = None,
    scale: Scale = "auto",
    frost: Sequence[Tensor] | None = None,
    chunk: int | None = None,
    device: torch.device | str | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """Corrupt a set of images chunk by chunk, without holding the result in memory.

    Args:
        images: As for `corrupt`.
        name: As for `corrupt`.
        severity: As for `corrupt`.
        seed: As for `corrupt`.
        samples: As for `corrupt`.
        scale: As for `corrupt`.
        frost: As for `corrupt`.
        chunk: As for `corrupt`.
        device: Device to compute on; None: that of the images. Chunks are returned on the images' device.

    Yields:
        The slice of the chunk, and its corrupted images, uint8 `(n, C, H, W)`.
    """
    _check_choice(name, severity)
    _check_images(images)
    count, channels, height, width = images.shape
    samples = _numbers(samples, count)
    if chunk is not None and chunk < 1:
        raise ValueError(f"`chunk` must be at least 1, got {chunk}.")
    resolved = resolve_scale(scale, height, width)
    level = _LEVELS[name][resolved][severity - 1]
    where = images.device if device is None else torch.device(device)
    if where.type == "mps":
        where = torch.device("cpu")  # exact sums need float64, which mps does not support
    with _plain(where):
        textures = frost_textures(resolved, frost, where) if name == "frost" else ()
    values = _CPU_VALUES_OF.get(name, _CPU_VALUES) if where.type == "cpu" else _GPU_VALUES
    step = chunk or max(1, values // (channels * height * width))
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        with _plain(where):  # not around the yield, where the caller's settings apply
            pixels = _eight_bits(images[part].to(where)).to(torch.float32)
            draws = Draws.of(seed, samples[part].to(where)).purpose(name).fold(severity)
            block = _finish(_apply(pixels, name, level, resolved, draws, textures)).to(images.device)
        yield part, block


def corrupt_noise(images: Tensor, name: noise.NoiseName, strength: Tensor, draws: Draws) -> Tensor:
    """Add one of the three noises, with a separate strength per image.

    The strength is on the scale of `severity_level`: the standard deviation of Gaussian noise, the photons at full
    white of shot noise (fewer are noisier), the fraction of values that impulse noise replaces.

    Args:
        images: uint8, or float in [0, 1], `(N, C, H, W)`.
        name: "gaussian_noise", "shot_noise" or "impulse_noise".
        strength: One per image, `(N,)`.
        draws: One stream per image, keys `(N,)`.

    Returns:
        uint8 `(N, C, H, W)`.

    Raises:
        ValueError: The name, a shape or a strength is invalid.
    """
    if name not in noise.NOISES:
        raise ValueError(f"`name` must be one of {', '.join(noise.NOISES)}, got {name!r}.")
    _check_images(images)
    if strength.shape != images.shape[:1] or draws.keys.shape != images.shape[:1]:
        raise ValueError(
            f"`strength` and `draws` must have one entry for each of {len(images)} images, "
            f"got shapes {tuple(strength.shape)} and {tuple(draws.keys.shape)}."
        )
    strength = strength.to(images.device, torch.float32)
    if len(images) and not (strength.min() >= 0 and torch.isfinite(strength).all()):
        raise ValueError("`strength` must be finite and not negative.")
    if name == "shot_noise" and len(images) and strength.min() <= 0:
        raise ValueError("`strength` of shot noise must be above 0 photons.")
    with _plain(images.device):
        pixels = _eight_bits(images).to(torch.float32)
        return _finish(noise.NOISES[name](pixels, strength, draws)) if len(images) else pixels.to(torch.uint8)


@contextlib.contextmanager
def _plain(device: torch.device) -> Iterator[None]:
    """Disable gradients, autocast, whose half precision would change 8-bit values, and inference mode.

    Tensors cached within the context are used outside of the caller's inference mode too.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _apply(pixels: Tensor, name: str, level: Any, scale: str, draws: Draws, textures: Sequence[Tensor]) -> Tensor:
    """Apply a corruption to float pixels, integers from 0 to 255, `(N, C, H, W)`."""
    if name in noise.NOISES:
        strength = torch.full((len(pixels),), float(level), dtype=torch.float32, device=pixels.device)
        return noise.NOISES[name](pixels, strength, draws)
    if name in _DETERMINISTIC:
        return _DETERMINISTIC[name](pixels, level)
    if name in _RANDOM:
        return _RANDOM[name](pixels, level, draws)
    if name == "frost":
        return weather.frost(pixels, level, draws, textures)
    sizes = digital.elastic_sizes(level, scale, min(pixels.shape[-2:]))
    return digital.elastic_transform(pixels, sizes, draws)


def _finish(pixels: Tensor) -> Tensor:
    """Clip and truncate to 8 bits as published, in place; the offset protects integers from rounding errors."""
    return pixels.add_(2**-10).clamp_(0, 255).to(torch.uint8)


def _eight_bits(images: Tensor) -> Tensor:
    if images.dtype == torch.uint8:
        return images
    return (images * 255).round_().clamp_(0, 255).to(torch.uint8)


def _check_choice(name: str, severity: int) -> None:
    if name not in _LEVELS:
        raise ValueError(f"`name` must be one of {', '.join(_LEVELS)}, got {name!r}.")
    if severity not in SEVERITIES:
        raise ValueError(f"`severity` must be 1 to 5, got {severity}.")


def _check_images(images: Tensor) -> None:
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(f"`images` must be uint8, or floating point in [0, 1], got {images.dtype}.")
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"`images` must be (N, C, H, W) with 1 or 3 channels, got shape {tuple(images.shape)}.")
    if min(images.shape[-2:]) < 1:
        raise ValueError(f"`images` must have at least one pixel, got shape {tuple(images.shape)}.")
    if not fits(*images.shape[-2:]):
        raise ValueError(f"`images` must have {LIMITS}, got shape {tuple(images.shape)}.")


def fits(height: int, width: int) -> bool:
    """Whether a size is within the limits: at most `SIDE_LIMIT` pixels per side and `PIXEL_LIMIT` in total."""
    return max(height, width) <= SIDE_LIMIT and height * width <= PIXEL_LIMIT


def _numbers(samples: Tensor | None, count: int) -> Tensor:
    if samples is None:
        return torch.arange(count, device="cpu")
    if samples.is_floating_point() or samples.dtype == torch.bool:
        raise TypeError(f"`samples` must be integers, got {samples.dtype}.")
    if samples.shape != (count,):
        raise ValueError(f"`samples` must have one index for each of {count} images, got {tuple(samples.shape)}.")
    return samples
