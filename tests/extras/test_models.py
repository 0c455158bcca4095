"""Models of timm, torchvision and transformers: each is split, answers as before, and learns from an image.

    python tests/extras/test_models.py docs/models.md

checks all models and writes the table of docs/models.md again. The tests take the models of everyday use and a third of
the others; all with TESTTIME_ALL_MODELS=1. Weights are random: nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import testtime as tt
from testtime.networks.outputs import find_images, pick_logits

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")
transformers = pytest.importorskip("transformers")

SIZES = (64, 96, 128, 160, 192, 224, 256, 288, 299, 384, 512)
"""The smallest that a model accepts is taken."""
HEADING = "## All models\n"
"""The table stands below it, at the end of docs/models.md."""
SHARES = (0.03, 0.003, 0.0003)
"""Parts of the loss that a step aims to take away, tried in this order: the scales of random weights differ."""
LIST = {
    "torchvision": "resnet18 resnet50 mobilenet_v3_small regnet_y_400mf vit_b_16 efficientnet_b0 convnext_tiny swin_t",
    "timm": "resnet26 resnet50 convnextv2_atto vit_tiny_patch16_224 deit_tiny_patch16_224 mobilenetv4_conv_small "
    "efficientvit_m0 swin_tiny_patch4_window7_224 efficientvit_b0",
    "transformers": "ResNet ViT ConvNext Dinov2",
}
"""The models of everyday use."""
TORCHVISION = (
    "alexnet vgg11 squeezenet1_1 densenet121 googlenet inception_v3 mnasnet0_5 mobilenet_v2 shufflenet_v2_x0_5 "
    "resnext50_32x4d wide_resnet50_2 efficientnet_v2_s swin_v2_t maxvit_t regnet_x_400mf"
)
TRANSFORMERS = "Swin Beit DeiT MobileNetV2 EfficientNet PvtV2 FocalNet Dinov2WithRegisters"
SMALLER = {
    "cait": "cait_xxs24_224", "convit": "convit_tiny", "davit": "davit_tiny", "deit": "deit_tiny_patch16_224",
    "eva": "eva02_tiny_patch14_224", "fasternet": "fasternet_t0", "focalnet": "focalnet_tiny_srf",
    "gcvit": "gcvit_xxtiny", "hgnet": "hgnetv2_b0", "iformer": "iformer_t", "mambaout": "test_mambaout",
    "metaformer": "poolformerv2_s12", "mobilenetv5": "mobilenetv5_base", "nest": "nest_tiny", "nfnet": "test_nfnet",
    "pit": "pit_ti_224", "rdnet": "rdnet_tiny", "senet": "legacy_seresnet18",
    "swin_transformer": "swin_tiny_patch4_window7_224", "swin_transformer_v2": "swinv2_tiny_window8_256",
    "swin_transformer_v2_cr": "swinv2_cr_tiny_224", "tnt": "tnt_s_legacy_patch16_224",
    "vision_transformer": "vit_tiny_patch16_224", "vision_transformer_hybrid": "vit_tiny_r_s16_p8_224",
    "vision_transformer_relpos": "vit_srelpos_small_patch16_224", "vitamin": "vitamin_small_224",
    "xcit": "xcit_nano_12_p8_224",
}  # fmt: skip
"""Module of timm → its smallest model, where the first one has over 60 million parameters."""
SHORTENED = {"beit_base_patch16_224", "deepseek_vit_412m", "gemma4_vit_167m", "naflexvit_base_patch16_gap",
             "qwen3_vit_88m", "samvit_base_patch16"}  # fmt: skip
"""Models of timm that are large all the same, built with four blocks."""
KNOWN = {"timm crossvit_9_240": "two tensors cross every cut: tokens of two sizes"}
"""Models that do not work, and why."""


@dataclass(frozen=True)
class Row:
    """What happened to a model; `fault` is empty if all is well."""

    model: str
    size: int
    cut: str = ""
    branch: str = ""
    fault: str = ""


def list_names() -> list[str]:
    """Return library and name of every model."""
    names = [f"{library} {name}" for library, names in LIST.items() for name in names.split()]
    names += [f"torchvision {name}" for name in TORCHVISION.split()]
    names += [f"transformers {name}" for name in TRANSFORMERS.split()]
    names += [f"timm {SMALLER.get(one) or timm.list_models(module=one)[0]}" for one in timm.list_modules()]
    return list(dict.fromkeys(names))


def sample_names() -> list[str]:
    """Return the models of everyday use, those that do not work, and every third of the others."""
    names, everyday = list_names(), sum(len(group.split()) for group in LIST.values())
    if os.environ.get("TESTTIME_ALL_MODELS") == "1":
        return names
    chosen = {*names[:everyday], *KNOWN, *names[everyday::3]}
    return [name for name in names if name in chosen]


def build(name: str) -> tuple[nn.Module, int]:
    """Return a model with random weights and the smallest of `SIZES` that it accepts."""
    library, _, kind = name.partition(" ")
    torch.manual_seed(0)
    if library == "transformers":
        return build_transformer(kind)
    options: list[dict[str, Any]] = [{}]
    if library == "timm":
        make: Callable[..., nn.Module] = timm.create_model
        depth = {"depth": 4} if kind in SHORTENED else {}
        options = [{"num_classes": 10, "img_size": 64, **depth}, {"num_classes": 10, **depth}]
    else:
        make = torchvision.models.get_model
        options = [{"weights": None, "num_classes": 10}]
        if kind == "vit_b_16":
            options[0]["image_size"] = 64
        if kind in ("googlenet", "inception_v3"):
            options[0]["init_weights"] = True
    for given in options:
        with contextlib.suppress(TypeError):
            model = make(kind, **given)
            for size in (64,) if "img_size" in given else SIZES:
                with contextlib.suppress(ValueError):
                    find_images(model.eval(), size)
                    return set_statistics(model, size), size
    raise ValueError(f"{name} accepts none of the sizes {SIZES}")


def set_statistics(model: nn.Module, size: int) -> nn.Module:
    """Give BatchNorm the statistics of some images: with initial ones, deep networks overflow."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().momentum = 1.0
    with torch.no_grad():
        model((make_pictures(4, size) - 0.5) / 0.25)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model.eval()


def build_transformer(kind: str) -> tuple[nn.Module, int]:
    """Return a small model of transformers."""
    small = {"hidden_size": 96, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 192}
    sizes: dict[str, dict[str, Any]] = {
        "ViT": small, "DeiT": small, "Beit": small, "Dinov2": {**small, "patch_size": 16},
        "Dinov2WithRegisters": {**small, "patch_size": 16},
        "ResNet": {"depths": [2, 2, 2, 2], "hidden_sizes": [32, 64, 96, 128], "embedding_size": 32},
        "ConvNext": {"depths": [2, 2, 4, 2], "hidden_sizes": [16, 32, 48, 64]},
        "Swin": {"embed_dim": 24, "depths": [2, 2, 4, 2], "num_heads": [1, 2, 3, 4], "window_size": 2},
        "MobileNetV2": {"depth_multiplier": 0.35}, "EfficientNet": {"width_coefficient": 0.5, "hidden_dim": 640},
        "PvtV2": {"depths": [2, 2, 2, 2]}, "FocalNet": {"embed_dim": 24, "depths": [2, 2, 4, 2]},
    }  # fmt: skip
    options = {"image_size": 64, "num_labels": 10, **sizes[kind]}
    config = getattr(transformers, f"{kind}Config")(**options)
    return getattr(transformers, f"{kind}ForImageClassification")(config).eval(), 64


def check(name: str) -> Row:
    """Split a model and let it learn from an image."""
    model, size = build(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    attributes = [set(vars(module)) for module in model.modules()]
    try:
        net = tt.split(model, size=size, mean=(0.5,), std=(0.25,))
    except ValueError as error:
        return Row(name, size, fault=str(error))
    branch = "head" if isinstance(net.ssl, nn.Sequential) else "copy"
    fault = find_difference(model, net, size) or find_learning_fault(net, size)
    if any(not torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items()):
        fault = "the model has changed"
    if [set(vars(module)) for module in model.modules()] != attributes:
        fault = "the model has other attributes"
    return Row(name, size, net.cut or "", branch, fault)


def make_pictures(count: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    small = torch.rand(count, 3, 8, 8, generator=generator)
    return nn.functional.interpolate(small, (size, size), mode="bilinear")


def find_difference(model: nn.Module, net: tt.YNet, size: int) -> str:
    images = make_pictures(3, size)
    with torch.no_grad():
        expected, found = pick_logits(model((images - 0.5) / 0.25)), net(images)
    return "" if torch.allclose(found, expected, rtol=1e-4, atol=1e-5) else "the logits differ"


def find_learning_fault(net: tt.YNet, size: int) -> str:
    """Return what is wrong with a step on an image; on unaugmented views, a small one must lower the task's loss."""
    image, task, fault = make_pictures(1, size), tt.Rotation("all"), ""
    views, targets = task.probe(image)
    loss = task.loss(net.self_supervise(views), targets).mean()
    moving = [parameter for part in (net.encoder, net.ssl) for parameter in part.parameters()]  # type: ignore[union-attr]
    gradients = torch.autograd.grad(loss, moving, allow_unused=True)
    steepness = sum(float(gradient.square().sum()) for gradient in gradients if gradient is not None)
    for share in SHARES:
        settings = {"lr": share * float(loss) / steepness, "copies": 2, "task": task, "statistics": "source"}
        adapter = tt.Online(net, **settings, augment=tt.CropFlip(padding=0, flip=False))
        prediction = adapter.predict(image)
        loss_before, loss_after = float(prediction.loss_before), float(prediction.loss_after)
        if loss_after < loss_before:
            return find_wrong_moves(net, adapter.network())
        fault = f"the loss does not fall: {loss_before:.6f} to {loss_after:.6f}"
    return fault


def find_wrong_moves(net: tt.YNet, learned: tt.YNet) -> str:
    before = net.state_dict()
    moved = {name for name, tensor in learned.state_dict().items() if not torch.equal(tensor, before[name])}
    named = net.named_parameters(remove_duplicate=False)  # some layers have two names
    free = {name for name, _ in named if not name.startswith("classifier.")}
    if not any(name.startswith("encoder.") for name in moved):
        return "the encoder does not move"
    return f"{sorted(moved - free)[0]} moves" if moved - free else ""


@pytest.mark.filterwarnings("ignore")  # of other people's code
@pytest.mark.parametrize("name", sample_names())
def test_a_model_is_split_and_learns(name: str) -> None:
    fault = check(name).fault
    assert name in KNOWN if fault else name not in KNOWN, fault


def format_table(rows: list[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| model | pixels | split after | branch | |", "|---|---:|---|---|---|"]
    for row in rows:
        result = "works" if not row.fault else KNOWN.get(row.model, row.fault)
        cut = f"`{row.cut}`" if row.cut else ""
        lines.append(f"| {row.model} | {row.size} | {cut} | {row.branch} | {result} |")
    lines.append(f"| {len(rows)} models | | | | {sum(not row.fault for row in rows)} work |")
    return "\n".join(lines)


def main(path: Path) -> None:
    """Check all models and write the table to the end of a document."""
    rows = []
    for name in list_names():
        rows.append(check(name))
        print(*(value for value in vars(rows[-1]).values() if value), flush=True)
    text = path.read_text(encoding="utf-8")
    path.write_text(f"{text.partition(HEADING)[0]}{HEADING}\n{format_table(rows)}\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
