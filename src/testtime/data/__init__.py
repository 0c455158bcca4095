"""Data sets: numbered uint8 images and labels, read by the chunk.

    test_set = testtime.data.open("cifar10-c/fog/5")
    for numbers, images, labels in test_set.chunks(256): ...

`open` takes a name: `digits` ships with the package, `cifar10`, `cifar10-c`, `cifar10.1`, `imagenet`, `imagenet-c`,
`vid-robust` and `vid-cifar7` are read from their official files, `folder` from any folder of pictures; corrupted and
gradually noisier sets are made from these where no files are. `TestSet` is what the rest of the package reads.
"""

from testtime.data.corrupted import Corrupted
from testtime.data.download import get
from testtime.data.folder import PictureSet
from testtime.data.gradual import Gradual
from testtime.data.pack import open_packed, pack
from testtime.data.pictures import fit_picture, read_picture
from testtime.data.places import data_root
from testtime.data.registry import Description, check, describe, describe_all, expand, names, open, pack_all
from testtime.data.sets import ArraySet, Chunk, DataError, OnBad, TensorSet, TestSet
from testtime.data.vid import max_convert

__all__ = [
    "ArraySet",
    "Chunk",
    "Corrupted",
    "DataError",
    "Description",
    "Gradual",
    "OnBad",
    "PictureSet",
    "TensorSet",
    "TestSet",
    "check",
    "data_root",
    "describe",
    "describe_all",
    "expand",
    "fit_picture",
    "get",
    "max_convert",
    "names",
    "open",
    "open_packed",
    "pack",
    "pack_all",
    "read_picture",
]
