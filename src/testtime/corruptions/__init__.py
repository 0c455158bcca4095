"""Fifteen ways in which the world spoils pictures, at five severities, as batched tensor code.

    corrupted = corrupt(images, "fog", severity=3, seed=0)      # (N, C, H, W) uint8 → uint8

`CORRUPTIONS` has the names in the order of every table. `corrupt_noise` takes a free strength for each image, for sets
that drift; `corrupt_chunks` works through a set without holding its result; `corrupt_file`, `corrupt_folder`,
`corrupt_cifar` and `corrupt_imagenet` work on disk, and `write_gallery` draws one picture of them all.
"""

from testtime.corruptions.files import corrupt_file
from testtime.corruptions.folders import Progress, corrupt_cifar, corrupt_folder, corrupt_imagenet, corrupt_path
from testtime.corruptions.gallery import draw_gallery, write_gallery
from testtime.corruptions.noise import NoiseName
from testtime.corruptions.registry import (
    CORRUPTIONS,
    SEVERITIES,
    Scale,
    corrupt,
    corrupt_chunks,
    corrupt_noise,
    resolve_scale,
    severity_level,
)
from testtime.storage import FileError

__all__ = [
    "CORRUPTIONS",
    "SEVERITIES",
    "FileError",
    "NoiseName",
    "Progress",
    "Scale",
    "corrupt",
    "corrupt_chunks",
    "corrupt_cifar",
    "corrupt_file",
    "corrupt_folder",
    "corrupt_imagenet",
    "corrupt_noise",
    "corrupt_path",
    "draw_gallery",
    "resolve_scale",
    "severity_level",
    "write_gallery",
]
