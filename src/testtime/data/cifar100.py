"""CIFAR-100 with its 100 fine classes, and CIFAR-100-C.

Both are read as CIFAR-10 and CIFAR-10-C are: from the official files, CIFAR-100-C also generated.
"""

from __future__ import annotations

from testtime.data.cifar_files import CifarArrays, CifarFiles
from testtime.data.family import Remote

# The order of `fine_label_names.txt`.
CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest",
    "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard",
    "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange", "orchid",
    "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine", "possum",
    "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper",
    "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone",
    "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf",
    "woman", "worm",
)  # fmt: skip
BINARY, PYTHON = "cifar-100-binary", "cifar-100-python"
ARCHIVES = {BINARY: "cifar-100-binary.tar.gz", PYTHON: "cifar-100-python.tar.gz"}

FILES = CifarFiles(
    "cifar100",
    "CIFAR-100",
    CLASSES,
    BINARY,
    PYTHON,
    ARCHIVES,
    files={"train": ["train"], "test": ["test"]},
    per_file={"train": 50_000, "test": 10_000},
    label_bytes=2,  # coarse, fine
    label_key=b"fine_labels",
)
ARRAYS = CifarArrays(FILES)

load, find = FILES.load, FILES.find
load_c, find_c = ARRAYS.load, ARRAYS.find

CIFAR100 = FILES.make_family(
    Remote(
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        168_513_733,
        "md5:03b5dce01913d631647c71ecec9e9cb8",
        BINARY,
    )
)

CIFAR100_C = ARRAYS.make_family(
    CIFAR100,
    Remote(
        "https://zenodo.org/records/3555552/files/CIFAR-100-C.tar",
        2_918_473_216,
        "md5:11f0ed0f1191edbf9fa23466ae6021d3",
        ARRAYS.folder,
    ),
)
