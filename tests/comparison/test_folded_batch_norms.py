"""Batch norms that a port holds in the maps beside them: right ones, and each planted fault by its name."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import normkit as nk
from checkpoint.test_channel_maps import planted
from normkit.comparison.folded_batch_norms import compare_folded
from normkit.comparison.report import describe_comparison
from normkit.comparison.running_statistics import compare_running
from normkit.comparison.values import compare_values
from normkit.comparison.weights import weights_of


class Net(nn.Module):
    """Convolutions and linear maps with batch norms behind them; `bn0` is before a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, groups=4), nn.BatchNorm2d(8, eps=1e-3)
        self.bn0, self.conv3 = nn.BatchNorm2d(8), nn.Conv2d(8, 6, 2)
        self.up, self.bn4 = nn.ConvTranspose2d(6, 4, 2), nn.BatchNorm2d(4)
        self.fc, self.bn3 = nn.Linear(4, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        x = torch.relu(self.conv3(self.bn0(x)))
        return self.bn3(self.fc(torch.relu(self.bn4(self.up(x))).mean((2, 3))))


def net() -> Net:
    torch.manual_seed(0)
    model = Net().eval()
    for number, module in enumerate(model.modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            planted(module, number).float()
    return model


BATCH = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_right_fold_of_any_map_is_exact_to_a_few_roundings(dtype: torch.dtype) -> None:
    model = net().to(dtype)
    reference = weights_of(copy.deepcopy(model))
    nk.fold(model, batch=BATCH)
    found = {each.path: each for each in compare_folded(weights_of(model), reference, ())}
    assert {path: each.into for path, each in found.items()} == {
        "bn1": "conv1.weight",
        "bn2": "conv2.weight",
        "bn0": "conv3.weight",
        "bn4": "up.weight",
        "bn3": "fc.weight",
    }
    assert all(each.is_right for each in found.values())
    # The fold is rounded once, and the multiples are read from rounded weights. In float64 the fold itself has four
    # roundings more, and a sum of 32 shifts.
    most = 8 if dtype == torch.float64 else 2.5
    assert all(each.roundings is not None and each.roundings <= most for each in found.values())
    assert found["bn0"].words.startswith("folded into the map after it: exact to ")
    assert found["bn1"].words.startswith("folded: exact to ")


def by_hand(model: Net, name: str, norm: str, scale: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """The state without a norm, with its scale in the weight of a map."""
    state = {key: value for key, value in model.state_dict().items() if not key.startswith(f"{norm}.")}
    state[f"{name}.weight"] = (state[f"{name}.weight"].double() * scale.view(-1, 1, 1, 1)).float()
    if bias is not None:
        state[f"{name}.bias"] = bias.float()
    return state


def plant(model: Net, fault: str) -> dict[str, Tensor]:
    """A fold of bn2 into conv2 with a fault."""
    norm = model.bn2
    own, mean = model.conv2.bias.detach().double(), norm.running_mean.double()
    var, gain, beta = norm.running_var.double(), norm.weight.detach().double(), norm.bias.detach().double()
    eps = {"eps": 1e-5, "no eps": 0.0}.get(fault, norm.eps)
    var = {"unbiased": var * 64 / 63, "biased": var * 63 / 64, "variance times 3": 3 * var}.get(fault, var)
    root = (var + eps).sqrt()
    scale = {
        "gain": 1 / root,
        "eps outside": gain / (var.sqrt() + eps),
        "no root": gain / (var + eps),
        "variance": gain,
        "times": gain * root,
        "dropped": torch.ones_like(gain),
        "bias alone": torch.ones_like(gain),
    }.get(fault, gain / root)
    bias = {
        "mean sign": (own + mean) * scale + beta,
        "no mean": own * scale + beta,
        "no bias": (own - mean) * scale,
        "bias sign": (own - mean) * scale - beta,
        "map's bias": beta - mean * scale,
        "map's bias not scaled": own - mean * scale + beta,
        "mean not scaled": own * scale - mean + beta,
        "nothing": torch.zeros_like(own),
        "kept": own,
        "another": (own - mean) * scale + beta + 0.5,
        "dropped": own,
        "bias alone": own - mean + beta,
    }.get(fault, (own - mean) * scale + beta)
    return by_hand(model, "conv2", "bn2", scale, bias)


FAULTS = {
    "none": "folded: exact to ",
    "eps": "folded with eps 1e-05 instead of 0.001",
    "no eps": "folded with eps 0 instead of 0.001",
    "unbiased": "folded with a running variance 1.015873 times the reference's, as if it were unbiased, ",
    "biased": "folded with a running variance 0.984375 times the reference's, as if it were biased, ",
    "variance times 3": "folded with a running variance 3 times the reference's",
    "gain": "folded without its gain",
    "eps outside": "folded with eps added to the deviation, not to the variance",
    "no root": "folded with the variance in place of its root",
    "variance": "folded without its running variance",
    "times": "folded multiplied by the standard deviation, not divided",
    "mean sign": "folded with the sign of the running mean turned",
    "no mean": "folded without its running mean",
    "no bias": "folded without its bias",
    "bias sign": "folded with the sign of its bias turned",
    "map's bias": "folded without the bias that the map had",
    "map's bias not scaled": "folded with the bias that the map had not scaled",
    "mean not scaled": "folded with a running mean that is not scaled",
    "nothing": "folded without any bias",
    "kept": "folded with the bias that the map had in place of its own",
    "another": "folded with another bias: it differs by ",
    "dropped": "not folded but dropped: the weight beside it is the reference's own",
    "bias alone": "folded into the bias alone",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_named(fault: str) -> None:
    model = net()
    (found,) = compare_folded(
        weights_of(plant(model, fault)),
        weights_of(model),
        compare_running(weights_of(plant(model, fault)), weights_of(model)),
    )
    assert (found.path, found.into) == ("bn2", "conv2.weight")
    assert found.words.startswith(FAULTS[fault])
    assert found.is_right is (fault == "none")


def test_two_norms_in_the_maps_of_each_other_are_wrong_and_a_reference_without_eps_leaves_it_open() -> None:
    model = net()
    swapped = copy.deepcopy(model)
    swapped.bn1.load_state_dict(model.bn2.state_dict())
    swapped.bn2.load_state_dict(model.bn1.state_dict())
    swapped.bn1.eps, swapped.bn2.eps = model.bn2.eps, model.bn1.eps
    nk.fold(swapped, batch=BATCH)
    words = {each.path: each.words for each in compare_folded(weights_of(swapped), weights_of(model), ())}
    assert words["bn1"] == "folded into the map of bn2"
    assert words["bn2"] == "folded into the map of bn1"
    state = copy.deepcopy(model).state_dict()
    nk.fold(model, batch=BATCH)
    found = {each.path: each for each in compare_folded(weights_of(model), weights_of(state), ())}
    assert found["bn2"].words.endswith("with eps 0.001, which the reference does not state")
    assert found["bn2"].is_right is None


def test_a_file_of_other_names_is_paired_by_its_numbers(tmp_path: Path) -> None:
    model = net()
    state = {**plant(model, "gain")}
    names = {"conv1.weight": "onnx::Conv_1", "conv2.weight": "onnx::Conv_7", "conv2.bias": "onnx::Conv_8"}
    save_file(
        {names.get(name, name): value.contiguous() for name, value in state.items()}, tmp_path / "port.safetensors"
    )
    found = nk.compare(tmp_path / "port.safetensors", model)
    assert found.causes[0].sentence == "The batch norm bn2 is folded without its gain."
    assert [each.into for each in found.values.batch_norms] == ["onnx::Conv_7"]


@pytest.mark.slow
def test_a_folded_model_is_the_same_and_the_report_says_why() -> None:
    model = net()
    reference = copy.deepcopy(model)
    nk.fold(model, batch=BATCH)
    found = nk.compare(model, reference, BATCH)
    assert found.verdict == "the same"
    detail = describe_comparison(found).verdict.detail
    assert "all 5 batch norms of the reference folded rightly, exact to " in detail.lower()
    assert found.to_json()["values"]["batch_norms"][0]["is_right"] is True
    assert found.values.missing == found.values.extra == found.values.others.missing == ()


def renamed(path: Path) -> None:
    """Give the folded maps of a file the names that torch.onnx.export(dynamo=True) gives them, and no modules."""
    import onnx

    graph = onnx.load(path)
    for node in graph.graph.node:
        if node.op_type == "Conv" and len(node.input) > 2 and node.input[2].startswith("onnx::"):
            weight = f"{node.name.split('/')[1]}.weight"
            names = dict(zip(node.input[1:], (weight, f"{weight}_bias"), strict=True))
            for tensor in graph.graph.initializer:
                tensor.name = names.get(tensor.name, tensor.name)
            node.input[1:] = names.values()
        node.name = ""
    onnx.save(graph, path)


@pytest.mark.slow
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("fault", ["none", "eps", "dropped"])
def test_an_export_to_onnx_is_seen_through(tmp_path: Path, fault: str, exporter: str) -> None:
    pytest.importorskip("onnx")
    model = net()
    changed = copy.deepcopy(model)
    if fault == "eps":
        changed.bn1.eps = 1e-3
    elif fault == "dropped":
        changed.bn1 = nn.Identity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(changed, (BATCH,), tmp_path / "net.onnx", dynamo=False)
    if exporter == "dynamo":
        renamed(tmp_path / "net.onnx")
    found = nk.compare(tmp_path / "net.onnx", model, BATCH)
    told = {each.path: each.words for each in found.values.batch_norms}
    # The exporter leaves the batch norms behind a transposed convolution, behind a linear map and before a convolution.
    assert sorted(told) == ["bn1", "bn2"]
    assert told["bn2"].startswith("folded: exact to ")
    assert told["bn1"].startswith(
        {
            "none": "folded: exact to ",
            "eps": "folded with eps 0.001 instead of 1e-05",
            "dropped": "not folded but dropped",
        }[fault]
    )
    assert (found.verdict == "different") == (fault != "none")


@pytest.mark.slow
def test_a_checkpoint_that_normkit_folded_on_disk_is_right_against_its_source(tmp_path: Path) -> None:
    from checkpoint.test_batch_norm_files import model_of
    from normkit.checkpoint.folding import fold

    model_of("ResNet").save_pretrained(tmp_path / "source")
    fold(tmp_path / "source", tmp_path / "result")
    found = compare_values(weights_of(tmp_path / "result"), weights_of(tmp_path / "source"))
    assert found.is_right
    assert len(found.batch_norms) == 11
    assert all(each.words.startswith("folded: exact to ") for each in found.batch_norms)
    # The norms that stay in it get other rows, and the outputs are the same.
    images = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))}
    assert nk.compare(tmp_path / "result", tmp_path / "source", images).verdict == "the same"
