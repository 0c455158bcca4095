"""Data sets: uint8 images and labels, read in chunks.

    test_set = testtime.data.open("cifar10-c/fog/5")
    for numbers, images, labels in test_set.chunks(256): ...

`open` takes a name: `digits` is bundled; `cifar10`, `cifar10-c`, `cifar10.1`, `cifar100`, `cifar100-c`, `imagenet`,
`imagenet-c`, `imagenet-v2`, `imagenet-r`, `imagenet-a`, `vid-robust` and `vid-cifar7` are read from their official
files, `folder` from any folder of pictures; corrupted and gradually noisier sets are generated from these if there are
no files. Settings are chosen on training images that were held out: `digits-held-out`, `cifar10-held-out`,
`cifar10-held-out-c`, …. `TestSet` is the interface for the rest of the package. To add a data set, add a `Family` to
`families.FAMILIES`.
"""

from testtime.data.corrupt_arrays import corrupt_cifar
from testtime.data.corrupt_files import corrupt_file
from testtime.data.corrupt_folders import corrupt_folder, corrupt_imagenet, corrupt_path
from testtime.data.corrupted import Corrupted
from testtime.data.download import get
from testtime.data.families import Description, check, describe, describe_all, expand, names, open, pack_all
from testtime.data.family import Family
from testtime.data.folder import PictureSet
from testtime.data.frost import read_frost
from testtime.data.gallery import draw_gallery, write_gallery
from testtime.data.gradual import Gradual
from testtime.data.packing import open_packed, pack
from testtime.data.paths import data_root
from testtime.data.pictures import fit_picture, read_picture
from testtime.data.sets import ArraySet, Chunk, DataError, OnBad, TensorSet, TestSet
from testtime.data.vid import max_convert

__all__ = [
    "ArraySet",
    "Chunk",
    "Corrupted",
    "DataError",
    "Description",
    "Family",
    "Gradual",
    "OnBad",
    "PictureSet",
    "TensorSet",
    "TestSet",
    "check",
    "corrupt_cifar",
    "corrupt_file",
    "corrupt_folder",
    "corrupt_imagenet",
    "corrupt_path",
    "data_root",
    "describe",
    "describe_all",
    "draw_gallery",
    "expand",
    "fit_picture",
    "get",
    "max_convert",
    "names",
    "open",
    "open_packed",
    "pack",
    "pack_all",
    "read_frost",
    "read_picture",
    "write_gallery",
]
