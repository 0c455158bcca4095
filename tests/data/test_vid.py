"""VID-Robust in its official layout, in miniature, against a naive reading of it."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from testtime import Episodic, Fixed, Online, YNet, resnet26
from testtime.data import DataError, max_convert, vid
from testtime.evaluation import make_plan, run_plan

# Outputs of a make-believe ImageNet network, and the VID classes; car and whale are not all CIFAR's.
OUTPUTS = {
    0: ["n02000001", "warbler"],
    1: ["n02000002", "liner"],
    2: ["n02000003", "robin"],
    3: ["n02000004", "teapot"],
    4: ["n02000005", "whale"],
    5: ["n02000006", "airliner"],
    6: ["n02000007", "sedan"],
    7: ["n02000008", "pug"],
    8: ["n02000009", "tabby"],
    9: ["n02000010", "sorrel"],
    10: ["n02000011", "coupe"],
}
VID = {
    0: ["n02691156", "airplane"],
    1: ["n00001740", "background"],
    2: ["n01503061", "bird"],
    3: ["n02958343", "car"],
    4: ["n02084071", "dog"],
    5: ["n02121808", "domestic_cat"],
    6: ["n02374451", "horse"],
    7: ["n04530566", "watercraft"],
    8: ["n02062744", "whale"],
}
MAP = {
    "n02000001": "n01503061",
    "n02000002": "n04530566",
    "n02000003": "n01503061",
    "n02000004": "n00001740",
    "n02000005": "n02062744",
    "n02000006": "n02691156",
    "n02000007": "n02958343",
    "n02000008": "n02084071",
    "n02000009": "n02121808",
    "n02000010": "n02374451",
    "n02000011": "n02958343",
}
ANCHORS = {"a/000001": [2], "b/000007": [8, 7], "c/000000": [8], "d/000000": [4, 5], "e/000003": [0]}


def frame(name: str) -> str:
    return f"val/{name}.JPEG"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    official = tmp_path / "imagenet-vid-robust"
    files: dict[str, Any] = {
        "metadata/pmsets.json": {frame(name): [frame(name + "x")] for name in ANCHORS},
        "metadata/labels.json": {frame(name): found for name, found in ANCHORS.items()}
        | {frame(name + "x"): found for name, found in ANCHORS.items()},
        "misc/wnid_map.json": MAP,
        "misc/imagenet_class_index.json": OUTPUTS,
        "misc/imagenet_vid_class_index.json": VID,
    }
    for name, content in files.items():
        (official / name).parent.mkdir(parents=True, exist_ok=True)
        (official / name).write_text(json.dumps(content))
    for shade, name in enumerate(ANCHORS, start=1):
        path = official / frame(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.new("RGB", (64, 36), (20 * shade,) * 3)
        picture.paste((255, 255, 255), (48, 0, 64, 36))
        picture.save(path, quality=100)
    return tmp_path


def naive_prediction(logits: list[float]) -> str:
    """The VID id that a row of ImageNet logits stands for, step by step from the files' meaning."""
    total = sum(math.exp(value) for value in logits)
    best: dict[str, float] = {}
    for output, (identity, _) in OUTPUTS.items():
        coarse = MAP[identity]
        if coarse != "n00001740":
            best[coarse] = max(best.get(coarse, 0.0), math.exp(logits[output]) / total)
    return max(best, key=lambda coarse: best[coarse])


def test_conversion_and_judgement_against_the_naive_way(root: Path) -> None:
    test_set = vid.load(root, size=32)
    assert (test_set.name, len(test_set), test_set.shape) == ("vid-robust", 5, (3, 32, 32))
    assert test_set.classes == tuple(name for identity, name in VID.values() if identity != "n00001740")
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        logits = torch.randn(5, 11, generator=generator) * 3
        predictions = test_set.scores(logits).argmax(1)
        right = test_set.is_correct(predictions)
        for row, found in enumerate(ANCHORS.values()):
            expected = naive_prediction(logits[row].tolist())
            assert test_set.classes[int(predictions[row])] == dict(VID.values())[expected]
            assert bool(right[row]) == (expected in [VID[label][0] for label in found])


def test_a_softmax_of_the_scores_is_proportional_to_the_converted_probabilities(root: Path) -> None:
    test_set, logits = vid.load(root, size=32), torch.randn(5, 11) * 3
    assert isinstance(test_set, vid.VidSet)
    chances = max_convert(logits, test_set.groups)
    torch.testing.assert_close(test_set.scores(logits).softmax(1), chances / chances.sum(1, keepdim=True))


def test_frames_are_the_anchors(root: Path) -> None:
    test_set = vid.load(root, size=32)
    assert test_set.files == [frame(name) for name in ANCHORS]
    assert test_set.labels is not None
    assert [test_set.classes[label] for label in test_set.labels] == ["bird", "whale", "whale", "dog", "airplane"]
    assert test_set.right is not None
    assert test_set.right.sum(1).tolist() == [1, 2, 1, 2, 1]
    assert [int(image[0, 16, 8]) // 10 for image in test_set.images(slice(None))] == [2, 4, 6, 8, 10]


def test_max_convert_is_a_maximum_of_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    chances = logits.softmax(1)[0]
    assert torch.equal(
        max_convert(logits, [(0, 2), (1,), (3, 0)])[0], torch.stack([chances[2], chances[1], chances[3]])
    )


def test_too_few_outputs(root: Path) -> None:
    with pytest.raises(ValueError, match="more than 10 outputs"):
        vid.load(root).scores(torch.zeros(2, 10))
    with pytest.raises(ValueError, match=r"\(n, 10\)"):
        vid.load_cifar7(root).scores(torch.zeros(2, 11))


def test_cifar7(root: Path) -> None:
    test_set = vid.load_cifar7(root)
    assert test_set.classes == ("airplane", "bird", "car", "dog", "cat", "horse", "ship")
    assert test_set.files == [frame(name) for name in ("a/000001", "b/000007", "d/000000", "e/000003")]
    assert test_set.right is not None
    assert test_set.right.nonzero().tolist() == [[0, 1], [1, 6], [2, 3], [2, 4], [3, 0]]
    images = test_set.images(slice(None))
    assert images.shape == (4, 3, 32, 32)
    assert int(images[0, 0, 16, 30]) > 240  # the right quarter is kept: the whole frame is scaled
    # airplane automobile bird cat deer dog frog horse ship truck
    logits = torch.tensor([[1.0, 2, 3, 4, 99, 5, 98, 6, 7, 97]])
    assert test_set.scores(logits).tolist() == [[1, 3, 2, 5, 4, 6, 7]]


def change(root: Path, name: str, key: str, value: Any) -> None:
    path = root / "imagenet-vid-robust" / name
    content = json.loads(path.read_text())
    if value is None:
        del content[key]
    else:
        content[key] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "key", "value", "fault"),
    [
        ("metadata/labels.json", frame("a/000001"), [31], "the class 31"),
        ("metadata/labels.json", frame("a/000001"), [1], "the class 1"),
        ("metadata/labels.json", frame("a/000001"), [], "no list of classes"),
        ("metadata/labels.json", frame("a/000001"), "bird", "no list of classes"),
        ("metadata/labels.json", frame("a/000001"), None, "no list of classes"),
        ("metadata/pmsets.json", "val/none.JPEG", [], "no list of classes"),
        ("metadata/pmsets.json", "../../etc/passwd", [], "leads out"),
        ("metadata/pmsets.json", "/etc/passwd", [], "leads out"),
        ("metadata/pmsets.json", frame("a/000001"), 5, "not a list"),
        ("misc/wnid_map.json", "n02000001", "n99", "does not list"),
        ("misc/wnid_map.json", "n02000001", ["n01503061"], "does not list"),
        ("misc/wnid_map.json", "n98", "n01503061", "does not list"),
        ("misc/wnid_map.json", "n02000005", None, "maps no ImageNet class to n02062744"),
        ("misc/imagenet_class_index.json", "x", ["a", "b"], "not a number"),
        ("misc/imagenet_vid_class_index.json", "9", ["n1"], "not a number"),
        ("misc/imagenet_vid_class_index.json", "9", ["n02062744", "again"], "twice"),
        ("misc/imagenet_vid_class_index.json", "9" * 5000, ["n1", "far"], "not a number"),
        ("misc/imagenet_vid_class_index.json", "\u0669", ["n1", "other digits"], "not a number"),
    ],
)
def test_files_that_do_not_fit(root: Path, name: str, key: str, value: Any, fault: str) -> None:
    change(root, name, key, value)
    with pytest.raises(DataError, match=rf"\.json: .*{fault}"):
        vid.load(root)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "[1]", "\ud800", "[" * 100_000])
def test_unreadable_json(root: Path, content: str) -> None:
    path = root / "imagenet-vid-robust/misc/wnid_map.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(DataError, match=r"wnid_map\.json: (not a JSON|an empty file)"):
        vid.load(root)


@pytest.mark.parametrize("name", ["val/a\0b", "val/\ud800", "val/" + "a" * 5000, ""])
def test_names_that_no_file_can_have(root: Path, name: str) -> None:
    change(root, "metadata/labels.json", name, [2])
    change(root, "metadata/pmsets.json", name, [])
    with pytest.raises(DataError) as raised:
        vid.load(root)
    assert str(raised.value).startswith(str(root))
    assert str(raised.value).isprintable()


def test_missing_parts(root: Path) -> None:
    official = root / "imagenet-vid-robust"
    (official / frame("c/000000")).unlink()
    with pytest.raises(DataError, match=r"c/000000\.JPEG: no such file"):
        vid.load(root)
    (official / "metadata/labels.json").unlink()
    with pytest.raises(DataError, match=r"labels\.json: no such file"):
        vid.load(official)
    with pytest.raises(DataError, match="holds no imagenet-vid-robust"):
        vid.load(root / "imagenet-vid-robust" / "val")


def test_frames_must_stay_inside(root: Path) -> None:
    path = root / "imagenet-vid-robust" / frame("c/000000")
    path.rename(root / "outside.JPEG")
    path.symlink_to(root / "outside.JPEG")
    with pytest.raises(DataError, match=r"c/000000\.JPEG: leads out of"):
        vid.load(root)


# The whole evaluation, with as many classes as the official set has ---------------------------------------------------

_SHARED = [f"n{number:08d}" for number in range(1, 24)] + [identity for identity, _ in vid.CIFAR7.values()]


class Frames:
    """30 classes and the background, 60 ImageNet outputs, 12 anchors with one, seven or thirteen right classes."""

    def __init__(self, place: Path) -> None:
        rng = random.Random(7)
        self.place = place / "vid-robust"
        names = [*_SHARED, vid.BACKGROUND]
        rng.shuffle(names)
        self.classes = {number: [identity, f"class {identity}"] for number, identity in enumerate(names)}
        self.outputs = {number: [f"n9{number:07d}", f"output {number}"] for number in range(60)}
        coarse = names + [rng.choice(names) for _ in range(len(self.outputs) - len(names))]
        rng.shuffle(coarse)
        self.coarse = {fine: group for (fine, _), group in zip(self.outputs.values(), coarse, strict=True)}
        known = [number for number, (identity, _) in self.classes.items() if identity != vid.BACKGROUND]
        self.right = {f"val/v{n}/{n:06d}.JPEG": rng.sample(known, 1 + 6 * (n % 3)) for n in range(12)}
        files: dict[str, Any] = {
            "metadata/pmsets.json": {frame: [] for frame in self.right},
            "metadata/labels.json": self.right,
            "misc/wnid_map.json": self.coarse,
            "misc/imagenet_class_index.json": self.outputs,
            "misc/imagenet_vid_class_index.json": self.classes,
        }
        for name, content in files.items():
            (self.place / name).parent.mkdir(parents=True, exist_ok=True)
            (self.place / name).write_text(json.dumps(content))
        for n, frame in enumerate(self.right):
            pixels = np.random.default_rng(n).integers(0, 256, (5, 8, 3), dtype=np.uint8)
            (self.place / frame).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).resize((96, 54)).save(self.place / frame, quality=95)

    def naive(self, logits: list[float]) -> str:
        """The VID id that ImageNet logits stand for."""
        total = sum(math.exp(value) for value in logits)
        best: dict[str, float] = {}
        for output, (fine, _) in self.outputs.items():
            if self.coarse[fine] != vid.BACKGROUND:
                best[self.coarse[fine]] = max(best.get(self.coarse[fine], 0), math.exp(logits[output]) / total)
        return max(best, key=lambda identity: best[identity])


def lively(net: YNet) -> YNet:
    """Weights by which different images get different answers: a random network's are nearly all the same."""
    images = torch.rand(32, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.interpolate(images, size=24, mode="bilinear")
    net.eval()
    with torch.no_grad():
        last = net.classifier[-1]  # type: ignore[index]
        last.weight.mul_(30)
        last.bias.sub_(net(images).mean(0))
    return net


def adapters(net: YNet) -> dict[str, Any]:
    learn: dict[str, Any] = {"lr": 0.05, "copies": 3}
    return {"fixed": Fixed(net), "episodic": Episodic(net, steps=2, **learn), "online": Online(net, steps=1, **learn)}


def answer(adapter: Any, pictures: list[Image.Image]) -> list[list[float]]:
    """Logits of one picture after the other."""
    answers = []
    for number, picture in enumerate(pictures):
        image = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
        logits: Tensor = adapter.predict(image, samples=torch.tensor([number])).logits
        answers.append(logits[0].tolist())
    return answers


def evaluate_frames(name: str, net: YNet, root: Path) -> dict[str, Any]:
    """The records of the three modes, through a plan and its run."""
    net.save(root / "net.safetensors")
    settings = {"steps": ["episodic=2", "online=1"], "lr": ["0.05"], "copies": ["3"]}
    plan = make_plan(checkpoint=root / "net.safetensors", data=[name], data_root=root, **settings)
    return {unit.method: unit.columns() for unit in run_plan(plan, root / "run").units}


def test_the_whole_evaluation_for_imagenet_networks(tmp_path: Path) -> None:
    frames = Frames(tmp_path)
    net = lively(resnet26(60, depth=8, size=24, seed=3).describe(classes=tuple(map(str, range(60)))))
    records = evaluate_frames("vid-robust", net, tmp_path)
    # Short side to 8/7 of 24, centre crop.
    pictures = [Image.open(frames.place / frame).convert("RGB").resize((48, 27), 2) for frame in frames.right]
    pictures = [picture.crop((12, 2, 36, 26)) for picture in pictures]
    ids = [identity for identity, _ in frames.classes.values() if identity != vid.BACKGROUND]
    seen: set[str] = set()
    for method, adapter in adapters(net).items():
        found = [frames.naive(logits) for logits in answer(adapter, pictures)]
        assert [ids[prediction] for prediction in records[method]["prediction"]] == found
        right = [
            any(frames.classes[label][0] == one for label in labels)
            for one, labels in zip(found, frames.right.values(), strict=True)
        ]
        assert records[method]["is_right"].tolist() == right
        assert 0 < sum(right) < len(right)
        seen.update(found)
    assert len(ids) == 30
    assert len(seen) > 2  # the answers differ, so the comparison says something


def test_the_whole_evaluation_for_cifar_networks(tmp_path: Path) -> None:
    frames = Frames(tmp_path)
    net = lively(resnet26(10, depth=8, seed=4).describe(classes=tuple(map(str, range(10)))))
    records = evaluate_frames("vid-cifar7", net, tmp_path)
    # airplane automobile bird cat deer dog frog horse ship truck, as CIFAR-10 numbers them
    seven = {0: "airplane", 2: "bird", 1: "car", 5: "dog", 3: "cat", 7: "horse", 8: "ship"}
    names = {identity: name for name, (identity, _) in vid.CIFAR7.items()}
    right = {
        frame: {names[frames.classes[label][0]] for label in labels if frames.classes[label][0] in names}
        for frame, labels in frames.right.items()
    }
    kept = [frame for frame, found in right.items() if found]
    assert 1 < len(kept) < len(right)
    pictures = [Image.open(frames.place / frame).convert("RGB").resize((32, 32), 2) for frame in kept]
    seen: set[str] = set()
    for method, adapter in adapters(net).items():
        found = [seven[max(seven, key=lambda k: logits[k])] for logits in answer(adapter, pictures)]
        assert [tuple(vid.CIFAR7)[prediction] for prediction in records[method]["prediction"]] == found
        assert records[method]["is_right"].tolist() == [
            one in right[frame] for one, frame in zip(found, kept, strict=True)
        ]
        seen.update(found)
    assert len(seen) > 2


def test_a_broken_frame_is_left_out_with_its_labels(root: Path) -> None:
    (root / "imagenet-vid-robust" / frame("b/000007")).write_bytes(b"broken")
    with pytest.raises(DataError, match=r"b/000007\.JPEG: not a picture"):
        vid.load(root, on_bad="fail")
    test_set = vid.load(root, size=16, on_bad="skip")
    assert test_set.files == [frame(name) for name in ("a/000001", "c/000000", "d/000000", "e/000003")]
    assert test_set.right is not None
    assert test_set.right.sum(1).tolist() == [1, 1, 2, 1]
    assert test_set.scores(torch.zeros(1, 11)).shape == (1, 8)
    assert test_set.skipped == ("val/b/000007.JPEG: not a picture in a known format",)
