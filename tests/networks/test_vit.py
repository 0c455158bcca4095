"""The vision transformer: against one written out, with patches hidden, and as replicas."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters import close, pictures
from testtime import Draws, Jigsaw, Masked, Online, Rotation, Streams, YNet, load, resnet26, vit
from testtime.networks.replicas import PARTS, Replicas
from testtime.networks.ynet import check_task
from testtime.tasks.masked import cut_patches

SMALL: dict[str, Any] = {"size": 16, "width": 24, "depth": 4, "heads": 2}


def small(outputs: int | None = None, seed: int = 1) -> YNet:
    return vit(**SMALL, outputs=outputs, seed=seed).eval()


def attend(block: Any, tokens: Tensor) -> Tensor:
    """A block for one image `(T, width)`, head by head."""
    width = tokens.shape[1] // block.heads
    query, key, value = block.qkv(block.norm1(tokens)).chunk(3, dim=1)
    parts = []
    for head in range(block.heads):
        q, k, v = (one[:, head * width : (head + 1) * width] for one in (query, key, value))
        parts.append((q @ k.T / math.sqrt(width)).softmax(1) @ v)
    tokens = tokens + block.out(torch.cat(parts, dim=1))
    return tokens + block.reduce(nn.functional.gelu(block.expand(block.norm2(tokens))))


def logits_by_hand(net: Any, image: Tensor) -> Tensor:
    tokens = []
    for place in range(16):
        row, column = divmod(place, 4)
        pixels = (image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] - 0.5) / 0.5
        tokens.append(net.encoder.embed(pixels.flatten()) + net.encoder.position.weight[:, place])
    x = torch.stack(tokens)
    for block in net.encoder.blocks:
        x = attend(block, x)
    block, norm, _, head = net.classifier
    return head(norm(attend(block, x)).mean(0))


@torch.no_grad()
def test_it_is_the_transformer_written_out() -> None:
    net, images = small(), pictures(3)
    expected = torch.stack([logits_by_hand(net, image) for image in images])
    assert torch.allclose(net(images), expected, atol=1e-5)


def show(images: Tensor, places: list[int]) -> Tensor:
    """Views with some visible patches of 4×4."""
    pixels = cut_patches(images, 4)[:, places].transpose(1, 2)
    rows, columns = torch.tensor(places) // 4, torch.tensor(places) % 4
    coordinates = torch.stack([rows, columns]).float()[None, :, :, None].expand(len(images), 2, len(places), 16)
    return torch.cat([pixels, coordinates], dim=1)


@torch.no_grad()
def test_all_patches_in_any_order_are_the_image() -> None:
    net, images = small(), pictures(3)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0)).tolist()
    features, expected = net.encode(show(images, order)), net.encode(images)
    assert torch.allclose(features, expected[:, order], atol=1e-5)
    assert torch.allclose(net.supervise(features), net.supervise(expected), atol=1e-5)


@torch.no_grad()
def test_the_encoder_sees_only_the_visible_patches() -> None:
    net, images = small(), pictures(3)
    other = images.clone()
    other[:, :, :4, :4] = 0  # patch 0
    outputs = net.self_supervise(show(images, [3, 9, 14]))
    assert outputs.shape == (3, 16, 48)
    assert torch.equal(outputs, net.self_supervise(show(other, [3, 9, 14])))
    assert not torch.allclose(outputs, net.self_supervise(show(images, [3, 9])), atol=1e-4)
    assert not torch.allclose(net.self_supervise(show(images, [0, 9])), net.self_supervise(show(other, [0, 9])))


def test_a_task_with_arguments_is_part_of_the_card() -> None:
    task = {"name": "masked", "ratio": 0.5}
    net = small().describe(task=task)
    assert net.card.task == task
    assert Online(net).settings.task == Masked(0.5)
    for wrong in ({"ratio": 0.5}, {"name": 3}, {"name": "masked", "ratio": float("nan")}, ["masked"], None):
        with pytest.raises(ValueError, match="`task`"):
            net.describe(task=wrong)
    assert net.card.task == task


def test_positions_start_different_and_near_ones_similar() -> None:
    weight = small().encoder.get_parameter("position.weight").detach()
    similar = torch.cosine_similarity(weight[:, :, None], weight[:, None, :], dim=0)  # (T, T)
    assert similar[~torch.eye(16, dtype=torch.bool)].max() < 0.99
    assert similar[0, 1] > similar[0, 3]
    assert similar[0, 4] > similar[0, 12]


@pytest.mark.parametrize(("outputs", "task"), [(4, "rotation"), (None, "masked")])
def test_it_is_small_and_saved_with_its_task(outputs: int | None, task: str, tmp_path: Path) -> None:
    assert sum(parameter.numel() for parameter in vit(outputs=outputs, device="meta").parameters()) < 6e6
    net = small(outputs)
    net.save(tmp_path / "net")
    again = load(tmp_path / "net")
    assert again.card == net.card
    assert again.card.task == task
    assert torch.equal(again(pictures()), net(pictures()))
    assert again.channels == 3
    coarse = vit(**SMALL, patch=8, outputs=None)
    coarse.save(tmp_path / "coarse")
    assert load(tmp_path / "coarse").card.task == {"name": "masked", "patch": 8}
    assert Online(load(tmp_path / "coarse"), copies=2).predict(pictures()).loss_before.isfinite().all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"patch": 5}, "`patch` must divide `size`"),
        ({"patch": 16}, "`patch` must divide `size`"),
        ({"heads": 5}, "`width` must be a multiple of twice `heads`"),
        ({"depth": 1}, "`depth` must be at least 2"),
        ({"outputs": 0}, "`outputs`"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        vit(**{**SMALL, **given})


def test_tasks_must_fit_the_branch() -> None:
    check_task(small(None), Masked())
    check_task(small(4), Rotation())
    for net, task, said in (
        (small(None), Rotation(), "'rotation' needs 4 outputs.*decoder for patches of 4"),
        (small(None), Masked(patch=2), "patches of 2 pixels.*patches of 4"),
        (small(4), Masked(), "'masked' needs a decoder"),
        (resnet26(depth=8, device="meta"), Masked(), "'masked' needs a decoder"),
        (small(4), Jigsaw(), "'jigsaw' needs 24 outputs"),
    ):
        with pytest.raises(ValueError, match=said):
            check_task(net, task)
    with pytest.raises(ValueError, match="for images of 16×16, got 8×8"):
        small()(torch.zeros(1, 3, 8, 8))


def different(net: YNet, count: int, layers: set[str] | None = None) -> tuple[Replicas, list[YNet]]:
    """Replicas with weights of their own, and the same networks one by one."""
    replicas = Replicas(net, count, PARTS, pictures(2, seed=9), layers=layers)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in replicas.tensors.values():
            tensor *= 0.8 + 0.4 * torch.rand(tensor.shape, generator=generator)
    nets = [copy.deepcopy(net) for _ in range(count)]
    for index, one in enumerate(nets):
        one.load_state_dict(one.state_dict() | replicas.read(index))
    return replicas, nets


@pytest.mark.parametrize("norms_only", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_replicas_are_separate_networks(count: int, norms_only: bool) -> None:
    net = small()
    norms = {name for name, layer in net.named_modules() if isinstance(layer, nn.LayerNorm)}
    replicas, nets = different(net, count, norms if norms_only else None)
    for name, parameter in replicas.parts["encoder"].inner.named_parameters():
        is_own = not norms_only or "norm" in name
        assert len(parameter) == (count if is_own else 1), name
    images, draws = pictures(count * 2).unflatten(0, (count, 2)), Draws.of(0, torch.arange(count * 2))
    views, targets = Masked().views(images.flatten(0, 1), draws)
    views, targets = views.unflatten(0, (count, 2)), targets.unflatten(0, (count, 2))
    parameters = {name: tensor.requires_grad_() for name, tensor in replicas.packed.parameters.items()}
    logits, outputs = replicas(images), replicas.self_supervise(views)
    loss = logits.square().sum() + Masked().loss(outputs.flatten(0, 1), targets.flatten(0, 1)).sum()
    gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    for index, one in enumerate(nets):
        assert torch.allclose(logits[index], one(images[index]), atol=1e-5)
        assert torch.allclose(outputs[index], one.self_supervise(views[index]), atol=1e-5)
        alone = one(images[index]).square().sum()
        alone = alone + Masked().loss(one.self_supervise(views[index]), targets[index]).sum()
        alone.backward()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient[index], one.get_parameter(name).grad, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_coordinates_survive_half_precision() -> None:
    net = vit(size=64, patch=2, width=8, depth=2, heads=1, outputs=None).eval()  # 1,024 patches
    images, draws = pictures(2, size=64), Draws.of(0, torch.arange(2))
    views, _ = Masked(patch=2).views(images, draws)
    half = Replicas(net, 1, (), pictures(2, size=64), torch.bfloat16)
    outputs, expected = half.self_supervise(views[None])[0].float(), net.self_supervise(views)
    assert (outputs - expected).square().mean() < 1e-3 * expected.square().mean()


@pytest.mark.parametrize("update", ["norm", "encoder+ssl"])
def test_streams_are_separate_online_adapters(update: str) -> None:
    net, given = small(), {"copies": 4, "lr": 0.05, "update": update}
    together, alone = Streams(net, 3, **given), [Online(net, **given) for _ in range(3)]
    for call in range(2):
        images, numbers = pictures(3, seed=call), torch.arange(3) + 10 * call
        answers = together.predict(images, numbers)
        for stream, one in enumerate(alone):
            expected = one.predict(images[[stream]], numbers[[stream]])
            assert close(answers[[stream]], expected, 1e-4)
            assert not torch.equal(expected.logits, expected.logits_before)
