"""Networks: the paper's sizes, models split in two, and checkpoints that say what is wrong with them."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import testtime.tensorfile
from adapters import pictures
from models import Residual, VisionTransformer
from testtime import Card, CheckpointError, YNet, bundled, load, resnet18, resnet26, resnet50, split
from testtime.randomness import Draws
from torch_defaults import DEFAULTS


def count_parameters(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def bits(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# The paper's networks


def test_resnet26_has_the_papers_number_of_parameters() -> None:
    net = resnet26()
    assert count_parameters(net.encoder, net.classifier) == 366_938
    assert count_parameters(net.encoder) == 88_720
    assert count_parameters(net.ssl) == 366_938 - 88_720 - 6 * 65  # 4 outputs of 64 features and a bias, not 10


def test_resnet18_and_50_have_the_usual_number_of_parameters() -> None:
    """The published 11,689,512 and 25,557,032: a scale and a shift replace BatchNorm's."""
    for build, expected in ((resnet18, 11_689_512), (resnet50, 25_557_032)):
        for norm in ("group", "batch"):
            net = build(norm=norm, device="meta")
            assert count_parameters(net.encoder, net.classifier) == expected


@pytest.mark.parametrize("depth", [8, 14, 26, 32])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_resnet_has_the_convolutions_its_depth_says(depth: int, norm: str) -> None:
    net = resnet26(depth=depth, norm=norm)  # type: ignore[arg-type]
    modules = [*net.encoder.modules(), *net.classifier.modules()]
    assert sum(isinstance(module, (nn.Conv2d, nn.Linear)) for module in modules) == depth
    kinds = {type(m) for m in modules if isinstance(m, (nn.GroupNorm, nn.BatchNorm2d))}
    assert all(issubclass(kind, nn.GroupNorm if norm == "group" else nn.BatchNorm2d) for kind in kinds)
    assert net.eval()(pictures(4)).shape == (4, 10)
    assert net.self_supervise(pictures(4)).shape == (4, 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"depth": 2}, "`depth` must be 6n \\+ 2 with n at least 1"),
        ({"depth": 27}, "got 27"),
        ({"norm": "layer"}, '`norm` must be "group" or "batch", got \'layer\''),
        ({"classes": 0}, "`classes` .* got 0"),
        ({"width": 0}, "`width`"),
        ({"channels": -1}, "`channels` .* got -1"),
        ({"outputs": 0}, "`outputs`"),
        ({"size": 0}, "`size`"),
        ({"classes": 10.0}, "`classes`"),
        ({"depth": "26"}, "`depth`"),
        ({"width": True}, "`width`"),
        ({"classes": 10**9}, "`classes`"),
    ],
)
def test_networks_that_do_not_exist_are_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        resnet26(**arguments)  # type: ignore[arg-type]


def test_the_ssl_branch_starts_as_a_copy_of_the_classifiers_trunk() -> None:
    net = resnet26(depth=8)
    classifier, ssl = bits(net.classifier[:-1]), bits(net.ssl[:-1])  # type: ignore[index]
    assert same_bits(classifier, ssl)
    pointers = {parameter.data_ptr() for parameter in net.classifier.parameters()}
    assert pointers.isdisjoint(parameter.data_ptr() for parameter in net.ssl.parameters())


def test_seeds_decide_the_weights_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, same, other = resnet26(depth=8, seed=1), resnet26(depth=8, seed=1), resnet26(depth=8, seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert same_bits(bits(one), bits(same))
    assert not torch.equal(one.encoder[0].weight, other.encoder[0].weight)  # type: ignore[index]


@pytest.mark.parametrize("build", [resnet26, resnet18])
def test_bytes_are_the_floats_they_stand_for(build: Callable[..., YNet]) -> None:
    net = build(depth=8).eval() if build is resnet26 else build(10).eval()
    whole = (pictures(2, size=32) * 255).round().to(torch.uint8)
    assert torch.equal(net(whole), net(whole.float() / 255))
    assert torch.equal(net.self_supervise(whole), net.self_supervise(whole.float() / 255))
    by_hand = (whole.float() / 255 - torch.tensor(net.card.mean).view(3, 1, 1)) / torch.tensor(net.card.std).view(
        3, 1, 1
    )
    assert torch.allclose(net(whole), net.classifier(net.encoder(by_hand)), atol=1e-6)


def test_odd_and_oblong_images_go_through() -> None:
    net = resnet26(depth=8).eval()
    for height, width in ((15, 15), (16, 10), (9, 13)):
        logits = net(Draws.of(0, torch.arange(2)).uniform(3, height, width))
        assert logits.shape == (2, 10)
        assert logits.isfinite().all()


def test_describe_changes_the_card_but_not_the_arithmetic() -> None:
    net = resnet26(depth=8).describe(classes=tuple("0123456789"), record={"epochs": 3})
    assert net.card.classes == tuple("0123456789")
    assert net.card.record == {"epochs": 3}
    with pytest.raises(ValueError, match="`mean` is fixed when a network is built"):
        net.describe(mean=(0.0, 0.0, 0.0))
    with pytest.raises(ValueError, match=r"`tsk` is not a field of the card \(.*task.*\), got 1"):
        net.describe(tsk=1)


# Checkpoints

BUILDERS: dict[str, Callable[[], YNet]] = {
    "resnet26": lambda: resnet26(depth=8, size=16, seed=5),
    "resnet26 of its own kind": lambda: resnet26(
        7, norm="batch", width=2, channels=1, depth=14, size=8, outputs=6, seed=5
    ),
    "resnet18": lambda: resnet18(12, size=32, seed=5),
    "resnet50": lambda: resnet50(5, norm="batch", size=32, outputs=3, seed=5),
}


@pytest.mark.parametrize("name", list(BUILDERS))
def test_a_saved_network_comes_back_bit_for_bit_with_its_card(name: str, tmp_path: Path) -> None:
    net = BUILDERS[name]().eval()
    net.describe(classes=[f"ü{n}" for n in range(len(net.classifier[-1].bias))])  # type: ignore[index, arg-type]
    net.describe(record={"epochs": [1, 2], "error": 0.1, "note": None})
    for buffer in net.buffers():
        if buffer.is_floating_point() and buffer.dim() == 1:
            buffer += 0.25  # statistics that are not the initial ones
    net.save(tmp_path / "net.safetensors")
    again = load(tmp_path / "net.safetensors")
    assert again.card == net.card
    assert not again.training
    assert same_bits(bits(net), bits(again))
    images = Draws.of(6, torch.arange(2)).uniform(len(net.card.mean), 32, 32)
    assert torch.equal(again(images), net(images))
    assert torch.equal(again.self_supervise(images), net.self_supervise(images))


@pytest.mark.parametrize("at", ["patch", "block1"])
def test_the_parts_of_a_split_hold_what_they_use_and_no_more(at: str) -> None:
    model = VisionTransformer()
    net = split(model, at)
    names = [*net.encoder.state_dict(), *net.classifier.state_dict()]
    assert sorted(names) == sorted(model.state_dict())


@pytest.mark.parametrize("at", ["patch", "block1"])
def test_a_custom_network_is_read_into_one_that_is_built_again(tmp_path: Path, at: str) -> None:
    torch.manual_seed(1)
    net = split(VisionTransformer(), at, classes="abcdefghij", size=16).eval().describe(record={"seed": 4})
    net.save(tmp_path / "vit")
    with pytest.raises(CheckpointError, match=r"vit: .*custom model.*load"):
        load(tmp_path / "vit")
    again = load(tmp_path / "vit", split(VisionTransformer(), at))
    assert torch.equal(again(pictures(4)), net(pictures(4)))
    assert torch.equal(again.self_supervise(pictures(4)), net.self_supervise(pictures(4)))
    assert again.card == net.card


def test_a_network_is_not_read_into_one_that_normalises_differently(tmp_path: Path) -> None:
    split(Residual(), "norm", mean=(0.5,), std=(0.5,)).save(tmp_path / "net")
    other = split(Residual(), "norm", mean=(0.4,), std=(0.5,))
    before = bits(other)
    with pytest.raises(CheckpointError, match=r"saved with normalisation mean \(0.5,\).* this network has mean \(0.4"):
        load(tmp_path / "net", other)
    assert same_bits(bits(other), before)


def test_a_builders_network_with_another_normalisation_comes_back_with_it(tmp_path: Path) -> None:
    net = resnet26(depth=8, size=16).eval()
    other = YNet(net.encoder, net.classifier, net.ssl, replace(net.card, mean=(0.0,) * 3, std=(1.0,) * 3)).eval()
    other.save(tmp_path / "net")
    assert torch.equal(load(tmp_path / "net")(pictures(4)), other(pictures(4)))


def test_a_network_whose_parts_share_a_layer_can_be_saved(tmp_path: Path) -> None:
    class Recurrent(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.cut = nn.ReLU()

        def forward(self, images: Tensor) -> Tensor:
            x = self.cut(self.left(self.stem(images)))
            return self.head(F.relu(self.top(self.left(x))).mean((2, 3)))

    net = split(Recurrent().eval(), "cut")
    net.save(tmp_path / "net")
    assert torch.equal(
        load(tmp_path / "net", split(Recurrent().eval(), "cut"))(pictures(4)),
        net(pictures(4)),
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "net.safetensors"
    resnet26(depth=8, size=16, seed=5).save(path)
    return path


@pytest.mark.parametrize("eighths", range(8))
def test_a_truncated_file_is_refused(checkpoint: Path, tmp_path: Path, eighths: int) -> None:
    content = checkpoint.read_bytes()
    (tmp_path / "part").write_bytes(content[: len(content) * eighths // 8])
    with pytest.raises(CheckpointError, match=r"part: (an empty|not a complete safetensors) file"):
        load(tmp_path / "part")


@pytest.mark.parametrize("missing", [1, 7, 100])
def test_a_file_that_lacks_its_last_bytes_is_refused(checkpoint: Path, tmp_path: Path, missing: int) -> None:
    (tmp_path / "part").write_bytes(checkpoint.read_bytes()[:-missing])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        load(tmp_path / "part")


def test_foreign_files_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"plain: .*testtime"):
        load(tmp_path / "plain")
    (tmp_path / "text").write_text("These are not the weights you are looking for.\n" * 20)
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.write(checkpoint, "net")
    torch.save(resnet26(depth=8).state_dict(), tmp_path / "pickle")
    for name in ("text", "zip", "pickle"):
        with pytest.raises(CheckpointError, match=f"{name}: not a complete safetensors file"):
            load(tmp_path / name)
    with pytest.raises(CheckpointError, match="a folder"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=r"resnet99: no such file.*digits-resnet8-gn-joint"):
        load("resnet99")


def rewrite(checkpoint: Path, path: Path, tensors: dict[str, Tensor] | None = None, **fields: object) -> Path:
    """A copy of a checkpoint with some tensors and some fields of its card replaced; None takes one out."""
    changed = load_file(checkpoint) | (tensors or {})
    card = {"format": 1, **asdict(load(checkpoint).card), **fields}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(kept, path, metadata={"testtime": json.dumps(card)})
    return path


LAST = "classifier.4.weight"


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({LAST: torch.zeros(9, 64)}, rf"'{LAST}' has shape \(9, 64\), the network needs \(10, 64\)"),
        ({LAST: None}, f"'{LAST}' is missing"),
        ({"extra": torch.zeros(1)}, "'extra' does not belong to this network"),
        ({LAST: torch.full((10, 64), float("nan"))}, f"'{LAST}' has values that are not finite"),
        ({LAST: torch.full((10, 64), float("inf"))}, f"'{LAST}' has values that are not finite"),
    ],
)
def test_wrong_tensors_are_named(checkpoint: Path, tmp_path: Path, tensors: dict[str, Tensor], said: str) -> None:
    path = rewrite(checkpoint, tmp_path / "changed", tensors)
    with pytest.raises(CheckpointError, match=said):
        load(path)
    net = resnet26(depth=8, size=16, seed=9)
    before = bits(net)
    with pytest.raises(CheckpointError, match=said):
        load(path, net)
    assert same_bits(bits(net), before)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architecture": {"name": "resnet99"}}, "'resnet99'"),
        ({"architecture": {"name": "resnet26", "depth": 9}}, "`depth` must be 6n"),
        ({"architecture": {"name": "resnet26", "colour": 9}}, "architecture.*'colour'"),
        ({"classes": None}, "`classes`"),
        ({"nonsense": 1}, "'nonsense'"),
        ({"format": 2}, "format 2.*reads format 1"),
        ({"format": "1"}, "format '1'.*reads format 1"),
        ({"format": 1.0}, "format 1.0.*reads format 1"),
        ({"format": True}, "format True.*reads format 1"),
    ],
)
def test_wrong_cards_are_told(checkpoint: Path, tmp_path: Path, fields: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        load(rewrite(checkpoint, tmp_path / "changed", **fields))


def test_a_later_format_is_named_even_if_its_card_has_more_fields(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="format 2"):
        load(rewrite(checkpoint, tmp_path / "changed", format=2, licence="MIT"))


def test_a_card_that_is_not_json_is_told(checkpoint: Path, tmp_path: Path) -> None:
    save_file(load_file(checkpoint), tmp_path / "changed", metadata={"testtime": "{not json"})
    with pytest.raises(CheckpointError, match=r"changed: .*JSON"):
        load(tmp_path / "changed")


def test_a_file_for_another_network_is_refused_and_that_one_stays(checkpoint: Path) -> None:
    other = resnet26(depth=14, size=16)
    before = bits(other)
    with pytest.raises(CheckpointError, match="architecture"):
        load(checkpoint, other)
    assert same_bits(bits(other), before)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net.safetensors"
    shutil.copy(checkpoint, path)

    def write_half(tensors: dict[str, Tensor], target: Path, metadata: dict[str, str]) -> None:
        Path(target).write_bytes(checkpoint.read_bytes()[:1000])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(testtime.tensorfile, "save_file", write_half)
    with pytest.raises(OSError, match="No space left"):
        resnet26(depth=8, size=16, seed=6).save(path)
    assert path.read_bytes() == checkpoint.read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["net.safetensors"]


@pytest.mark.parametrize("place", [100, 1000, 4000, 100_000, -1])
def test_a_flipped_bit_is_noticed(checkpoint: Path, tmp_path: Path, place: int) -> None:
    content = bytearray(checkpoint.read_bytes())
    content[place] ^= 1
    (tmp_path / "flipped").write_bytes(content)
    with pytest.raises(CheckpointError, match="flipped: "):
        load(tmp_path / "flipped")


def test_a_file_of_version_0_1_has_no_checksum_and_loads(checkpoint: Path, tmp_path: Path) -> None:
    net = load(checkpoint)
    with safe_open(checkpoint, framework="pt") as file:
        about = json.loads(file.metadata()["testtime"])
    assert about.pop("sha256")
    save_file(load_file(checkpoint), tmp_path / "old", metadata={"testtime": json.dumps(about)})
    again = load(tmp_path / "old")
    assert same_bits(bits(net), bits(again))
    assert again.card == net.card


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_precision_become_the_networks(checkpoint: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    rounded = {name: tensor.to(dtype) for name, tensor in load_file(checkpoint).items()}
    net = load(rewrite(checkpoint, tmp_path / "rounded", rounded))
    assert {tensor.dtype for tensor in net.state_dict().values()} == {torch.float32}
    assert same_bits(bits(net), {name: tensor.float() for name, tensor in rounded.items()})
    own = load(tmp_path / "rounded", resnet26(depth=8, size=16).double())
    assert {tensor.dtype for tensor in own.state_dict().values()} == {torch.float64}


def test_counters_and_masks_of_a_network_keep_their_types(tmp_path: Path) -> None:
    def make() -> YNet:
        net = YNet(nn.Sequential(nn.Conv2d(3, 4, 16), nn.BatchNorm2d(4)), *(make_head(k) for k in (10, 4)))
        net.classifier.register_buffer("mask", torch.tensor([True, False]))
        net.classifier.register_buffer("phase", torch.tensor([1 + 2j]))
        return net

    net = make()
    net.encoder(pictures(4))
    net.save(tmp_path / "net")
    assert same_bits(bits(load(tmp_path / "net", make())), bits(net))


def make_head(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, outputs))


def test_a_card_of_another_architecture_is_not_read_into_a_network(checkpoint: Path, tmp_path: Path) -> None:
    other = {"name": "resnet18", "classes": 10, "norm": "group", "size": 16, "outputs": 4}
    net = resnet26(depth=8, size=16)
    with pytest.raises(CheckpointError, match="resnet18"):
        load(rewrite(checkpoint, tmp_path / "changed", architecture=other), net)
    larger = resnet26(depth=8, size=32)  # of the same network, for other images
    assert load(checkpoint, larger).card.size == 16


@pytest.mark.parametrize(
    "classes", [("a", "b", "c"), tuple("0123456789a"), tuple(range(10)), ("a\x1b[31m", *"123456789")]
)
def test_names_that_are_not_the_outputs_are_refused(classes: Any, checkpoint: Path, tmp_path: Path) -> None:
    made = [resnet26(depth=8), split(Residual(), "norm"), YNet(nn.Conv2d(3, 4, 16), make_head(10), make_head(4))]
    for net in made:
        before = net.card
        with pytest.raises(ValueError, match="class"):
            net.describe(classes=classes)
        assert net.card is before
    with pytest.raises(ValueError, match="class"):
        split(Residual(), "norm", classes=classes)
    with pytest.raises(CheckpointError, match=r"changed: .*class"):
        load(rewrite(checkpoint, tmp_path / "changed", classes=classes))
    net = resnet26(depth=8, size=16)
    with pytest.raises(CheckpointError, match=r"changed: .*class"):
        load(tmp_path / "changed", net)
    assert net.card.classes == ()


def test_normalisation_may_come_as_a_tensor(tmp_path: Path) -> None:
    net = split(Residual(), "norm", mean=torch.tensor([0.5, 0.25, 0.0]), std=torch.ones(3).numpy())  # type: ignore[arg-type]
    assert (net.card.mean, net.card.std) == ((0.5, 0.25, 0.0), (1.0, 1.0, 1.0))
    net.save(tmp_path / "net")
    assert load(tmp_path / "net", copy.deepcopy(net)).card == net.card


def test_a_network_with_lazy_layers_is_to_be_called_before_it_is_read_into(tmp_path: Path) -> None:
    def make() -> YNet:
        return YNet(nn.Conv2d(3, 4, 16), nn.Sequential(nn.Flatten(), nn.LazyLinear(10)), make_head(4))

    net = make()
    net(pictures(4))
    net.save(tmp_path / "net")
    with pytest.raises(CheckpointError, match=r"net: .*lazy"):
        load(tmp_path / "net", make())


def test_names_are_free_where_the_outputs_are_unknown() -> None:
    pooled = nn.Sequential(nn.Conv2d(4, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = YNet(nn.Conv2d(3, 4, 16), pooled, make_head(4))
    assert net.describe(classes=["ant", "bee"]).card.classes == ("ant", "bee")


@pytest.mark.parametrize(
    "fields",
    [
        {"size": 0}, {"size": "16"}, {"task": None}, {"augment": []}, {"record": [1]}, {"architecture": "resnet26"},
        {"mean": ()}, {"mean": ("0.5",)}, {"mean": (float("inf"),)}, {"std": (1e-300,)}, {"classes": None},
    ],
)  # fmt: skip
def test_a_card_is_checked_when_it_is_made(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(fields))}`"):
        Card(**fields)


@pytest.mark.parametrize("name", ["padding", "size"])
@pytest.mark.parametrize(("size", "most"), [(16, 64), (None, 4096)])
def test_views_are_limited_by_the_size_of_the_images(name: str, size: int | None, most: int) -> None:
    kind = {"padding": "crop-flip", "size": "resized-crop-flip"}[name]
    for make in (
        lambda augment: Card(size=size, augment=augment),
        lambda augment: Card(size=size, settings={"online": {"augment": augment}}),
    ):
        make({"name": kind, name: most})
        with pytest.raises(ValueError, match=f"`{name}`.* {most:,}, got {most + 1}"):
            make({"name": kind, name: most + 1})


@pytest.mark.parametrize(("name", "most"), [("copies", 4096), ("steps", 1000)])
def test_recommended_copies_and_steps_are_limited(name: str, most: int) -> None:
    assert Card(settings={"episodic": {name: most}}).settings == {"episodic": {name: most}}
    with pytest.raises(ValueError, match=f"`{name}`.* {most:,}, got {most + 1}"):
        Card(settings={"episodic": {name: most + 1}})


def test_a_record_that_json_cannot_hold_is_not_saved(tmp_path: Path) -> None:
    net = resnet26(depth=8).describe(record={"loss": float("nan")})
    with pytest.raises(ValueError, match="finite"):
        net.save(tmp_path / "net")
    assert not list(tmp_path.iterdir())


def test_the_fingerprint_of_any_precision() -> None:
    net = resnet26(depth=8, norm="batch", size=16, seed=5)
    digest = hashlib.sha256(repr((net.card.mean, net.card.std)).encode())
    for name, tensor in net.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    assert net.fingerprint() == digest.hexdigest()[:16]
    assert len(net.bfloat16().fingerprint()) == 16


# Defaults of torch


SPLIT = Residual()
MADE: dict[str, Callable[[], YNet]] = {
    "bundled": lambda: load("digits-resnet8-gn-joint"),
    "bundled, batch": lambda: load("cifar10-resnet26-bn-joint"),
    "resnet26": lambda: resnet26(),
    "resnet26, batch": lambda: resnet26(norm="batch", depth=8),
    "resnet18": lambda: resnet18(10),
    "split": lambda: split(SPLIT, "norm", mean=(0.1, 0.2, 0.3)),
    "own parts": lambda: YNet(SPLIT.stem, SPLIT.top, SPLIT.right, Card(mean=(0.1, 0.2, 0.3))),
}


def read_content(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a file; safetensors writes the metadata in any order."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), content[start:]


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("made", MADE)
def test_networks_do_not_depend_on_the_defaults_of_torch(made: str, default: str, tmp_path: Path) -> None:
    expected = MADE[made]()
    expected.save(tmp_path / "expected")
    with DEFAULTS[default]():
        net = MADE[made]()
        net.save(tmp_path / "found")
    assert read_content(tmp_path / "found") == read_content(tmp_path / "expected")
    assert net.fingerprint() == expected.fingerprint()
    for tensor in (*net.parameters(), *net.buffers()):
        assert tensor.device.type == "cpu"
        assert tensor.dtype in (torch.float32, torch.int64)
        assert not tensor.is_inference()
    assert torch.equal(net.mean, expected.mean)
    assert torch.equal(net.std, expected.std)
    assert [one.requires_grad for one in net.parameters()] == [one.requires_grad for one in expected.parameters()]


@pytest.mark.parametrize("default", DEFAULTS)
def test_a_network_is_read_into_one_whatever_the_defaults(default: str, checkpoint: Path) -> None:
    net = resnet26(depth=8, size=16, seed=1)
    with DEFAULTS[default]():
        load(checkpoint, net)
    assert same_bits(bits(net), bits(load(checkpoint)))


def test_a_network_made_in_inference_mode_can_be_read_into(checkpoint: Path) -> None:
    with torch.inference_mode():
        net = copy.deepcopy(resnet26(depth=8, size=16, seed=1))
        load(checkpoint, net)
    assert same_bits(bits(net), bits(load(checkpoint)))


def test_shipped_networks_load_by_name() -> None:
    for name in bundled():
        net = load(name)
        assert net.card.record
        assert not net.training


def test_a_ynet_of_ones_own_parts_needs_no_card(tmp_path: Path) -> None:
    parts = [nn.Conv2d(3, 4, 3), *(nn.Sequential(nn.Flatten(), nn.Linear(4 * 14 * 14, k)) for k in (10, 4))]
    net = YNet(*parts).eval()
    assert net.card == Card()
    assert torch.equal(net(pictures(4)), parts[1](parts[0](pictures(4))))
    assert torch.equal(net.self_supervise(pictures(4)), parts[2](parts[0](pictures(4))))
    net.save(tmp_path / "own")
    again = load(tmp_path / "own", YNet(*copy.deepcopy(parts)))
    assert torch.equal(again(pictures(4)), net(pictures(4)))
