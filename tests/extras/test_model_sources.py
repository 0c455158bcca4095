"""Models of timm, torchvision and transformers, opened by text: they compute what the library's model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from testtime.networks.sources import open_network
from testtime.storage import FileError


def images() -> Tensor:
    return torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def test_a_model_of_timm(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(2)
    model = timm.create_model("resnet10t", num_classes=7).eval()
    torch.save(model.state_dict(), tmp_path / "w")
    for branch in (False, True):
        net = open_network(f"timm:resnet10t,weights={tmp_path / 'w'}", branch)
        assert (net.has_branch, net.card.size) == (branch, model.pretrained_cfg["input_size"][-1])
        with torch.no_grad():
            assert torch.allclose(net(images()), model(net.normalise(images())), atol=1e-5)
    with pytest.raises(ValueError, match="timm has no model 'nope'"):
        open_network(f"timm:nope,weights={tmp_path / 'w'}")


def test_a_model_of_torchvision(tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(2)
    model = torchvision.models.resnet18(num_classes=7).eval()
    save_file(model.state_dict(), tmp_path / "w")
    net = open_network(f"torchvision:resnet18,weights={tmp_path / 'w'}")
    assert (net.card.size, len(net.card.mean)) == (224, 3)
    with torch.no_grad():
        assert torch.allclose(net(images()), model(net.normalise(images())), atol=1e-5)
    with pytest.raises(ValueError, match="torchvision has no classifier 'nope'"):
        open_network(f"torchvision:nope,weights={tmp_path / 'w'}")


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    names = {0: "cat", 1: "dog", 2: "bird"}
    config = transformers.ViTConfig(**sizes, intermediate_size=16, image_size=16, patch_size=8, id2label=names)
    torch.manual_seed(2)
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    for branch in (False, True):
        net = open_network(f"transformers:{tmp_path / 'vit'}", branch)
        assert (net.card.size, net.card.mean, net.card.classes) == (16, (0.5,) * 3, ("cat", "dog", "bird"))
        with torch.no_grad():
            assert torch.allclose(net(images()), model(net.normalise(images())).logits, atol=1e-5)
    (tmp_path / "vit" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(FileError, match="vit: transformers cannot open it"):
        open_network(f"transformers:{tmp_path / 'vit'}")
