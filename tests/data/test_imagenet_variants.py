"""ImageNet-V2, ImageNet-R and ImageNet-A in their official layouts, in miniature."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

import testtime.data
from testtime.data import DataError, check, describe, expand, imagenet_variants
from testtime.data.families import FAMILIES

ALL = tuple(f"n{number:08}" for number in range(1, 11))  # a network of ten classes
SOME = (ALL[1], ALL[4], ALL[8])
SUBSETS = ("imagenet-r", "imagenet-a")


def write(folder: Path, classes: tuple[str, ...], suffix: str = "jpg", count: int = 2) -> Path:
    for shade, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (40, 30), (20 * shade,) * 3).save(folder / name / f"{number}.{suffix}")
    return folder


@pytest.mark.parametrize("variant", imagenet_variants.FOLDERS_V2)
@pytest.mark.parametrize("parent", ["", "imagenet-v2"])
def test_v2_labels_are_the_numbers_of_the_folders(tmp_path: Path, variant: str, parent: str) -> None:
    folder = write(tmp_path / parent / imagenet_variants.FOLDERS_V2[variant], ("10", "2", "999"), "jpeg")
    name = "imagenet-v2" if variant == "matched-frequency" else f"imagenet-v2/{variant}"
    for root in (tmp_path, folder):
        found = testtime.data.open(f"imagenet-v2/{variant}", root, size=16)
        assert (found.name, found.shape, len(found.classes)) == (name, (3, 16, 16), 1000)
        assert found.labels is not None
        assert found.labels.tolist() == [2, 2, 10, 10, 999, 999]
        assert [int(image.float().mean() + 0.5) for image in found.images([0, 2, 4])] == [20, 0, 40]
    assert found.scores(torch.eye(1000)).equal(torch.eye(1000))


def test_v2_names() -> None:
    assert FAMILIES["imagenet-v2"].names == ("imagenet-v2", "imagenet-v2/threshold-0.7", "imagenet-v2/top-images")
    assert expand("imagenet-v2/*") == ("imagenet-v2/threshold-0.7", "imagenet-v2/top-images")
    with pytest.raises(ValueError, match="`variant`"):
        testtime.data.open("imagenet-v2/threshold")


@pytest.mark.parametrize("wrong", ["1000", "02", "n01440764"])
def test_v2_folders_that_are_no_class(tmp_path: Path, wrong: str) -> None:
    folder = write(tmp_path / imagenet_variants.FOLDERS_V2["matched-frequency"], ("0", "1", wrong), "jpeg")
    with pytest.raises(DataError) as raised:
        testtime.data.open("imagenet-v2", tmp_path)
    assert raised.value.path == str(folder / wrong)


@pytest.mark.parametrize("name", SUBSETS)
def test_a_networks_answers_are_restricted_to_the_classes_of_the_set(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, SOME)
    (tmp_path / name / "README.txt").write_text("about")
    for outputs in (ALL, ALL[::-1]):
        found = testtime.data.open(name, tmp_path, size=16, classes=outputs)
        assert (found.name, found.classes, len(found)) == (name, SOME, 6)
        assert found.labels is not None
        assert found.labels.tolist() == [0, 0, 1, 1, 2, 2]
        logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
        predictions = found.scores(logits).argmax(1)
        for row, prediction in zip(logits.tolist(), predictions.tolist(), strict=True):
            assert found.classes[prediction] == max(SOME, key=lambda wnid: row[outputs.index(wnid)])
        with pytest.raises(ValueError, match="`logits`"):
            found.scores(torch.zeros(1, 9))


@pytest.mark.parametrize("name", SUBSETS)
def test_without_classes_the_network_has_those_of_the_set(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / name, SOME)
    found = testtime.data.open(name, folder, size=16)
    assert found.scores(torch.eye(3)).equal(torch.eye(3))
    with pytest.raises(ValueError, match="`classes`"):
        found.scores(torch.zeros(1, 1000))


def test_a_class_that_the_network_lacks(tmp_path: Path) -> None:
    folder = write(tmp_path / "imagenet-r", SOME)
    with pytest.raises(DataError) as raised:
        testtime.data.open("imagenet-r", tmp_path, classes=ALL[:5])
    assert raised.value.path == str(folder / SOME[2])


@pytest.mark.parametrize(
    ("name", "folder", "classes"),
    [
        ("imagenet-v2", imagenet_variants.FOLDERS_V2["matched-frequency"], ("0", "1")),
        ("imagenet-r", "imagenet-r", SOME),
        ("imagenet-a", "imagenet-a", SOME),
    ],
)
def test_missing_and_damaged_files(tmp_path: Path, name: str, folder: str, classes: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=f"holds no {folder}"):
        testtime.data.open(name, tmp_path)
    missing = describe(name, tmp_path)
    assert (missing.state, missing.path) == ("missing", tmp_path / folder)
    assert str(tmp_path) in missing.detail

    path = write(tmp_path / folder, classes)
    assert check(name, tmp_path) == []
    assert describe(name, tmp_path).state == "incomplete"
    assert f"{2 * len(classes)} pictures of {len(classes)} classes" in describe(name, tmp_path).detail

    (path / classes[0] / "1.jpg").write_bytes(b"")
    assert [fault.split(": ")[0] for fault in check(name, tmp_path)] == [str(path / classes[0] / "1.jpg")]
    with pytest.raises(DataError, match=r"1\.jpg: "):
        testtime.data.open(name, tmp_path, on_bad="fail")
    (path / classes[1] / "0.jpg").unlink()
    (path / classes[1] / "1.jpg").unlink()
    with pytest.raises(DataError) as raised:
        testtime.data.open(name, tmp_path)
    assert raised.value.path == str(path / classes[1])
    rest = testtime.data.open(name, tmp_path, size=16, on_bad="skip")
    assert [line.split(": ")[0] for line in rest.skipped] == [classes[1], f"{classes[0]}/1.jpg"]
    assert rest.labels is not None
    assert rest.labels.tolist() == [0, *[2] * 2 * (len(classes) - 2)]
