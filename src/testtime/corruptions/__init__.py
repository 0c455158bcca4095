"""The corruptions of CIFAR-10-C and ImageNet-C, at five severities, as batched tensor code.

    corrupted = corrupt(images, "fog", severity=3, seed=0)      # (N, C, H, W) uint8 → uint8

`CORRUPTIONS` lists the fifteen names in the order of the published tables; `EXTRA` lists four more, meant for choosing
settings. `corrupt_noise` takes a continuous strength per image, for gradual shifts; `corrupt_chunks` corrupts a set
without holding the result in memory. `testtime.data` corrupts files.
"""

from testtime.corruptions.noise import NoiseName
from testtime.corruptions.registry import (
    CORRUPTIONS,
    EXTRA,
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
    "EXTRA",
    "SEVERITIES",
    "NoiseName",
    "Scale",
    "corrupt",
    "corrupt_chunks",
    "corrupt_noise",
    "resolve_scale",
    "severity_level",
]
