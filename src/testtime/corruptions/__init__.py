"""Fifteen ways in which the world spoils pictures, at five severities, as batched tensor code.

    corrupted = corrupt(images, "fog", severity=3, seed=0)      # (N, C, H, W) uint8 → uint8

`CORRUPTIONS` has the names in the order of every table. `corrupt_noise` takes a free strength for each image, for sets
that drift; `corrupt_chunks` works through a set without holding its result. `testtime.data` corrupts files.
"""

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

__all__ = [
    "CORRUPTIONS",
    "SEVERITIES",
    "NoiseName",
    "Scale",
    "corrupt",
    "corrupt_chunks",
    "corrupt_noise",
    "resolve_scale",
    "severity_level",
]
