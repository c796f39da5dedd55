"""Batch norms on disk: the bits of `nk.fold`, proved from the files, and a reason for each that stays."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import normkit as nk
from checkpoint.test_channel_maps import planted
from folded_checkpoints import flip, tensors
from normkit.checkpoint import batch_norm_files
from normkit.checkpoint.applying import contents, vectors
from normkit.checkpoint.folding import Workers, fold
from normkit.checkpoint.matrices import Outcome
from normkit.checkpoint.opening import OpenedFolder, open_checkpoint
from normkit.checkpoint.planning import make_plan
from normkit.checkpoint.reader import ModelSource
from normkit.checkpoint.verification import verify
from normkit.errors import InputError, ModelError

SMALL = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 2]}
FAMILIES = {
    "ResNet": SMALL | {"layer_type": "bottleneck"},
    "RegNet": SMALL | {"groups_width": 4},
    "MobileNetV1": {"depth_multiplier": 0.0625, "min_depth": 4},
    "MobileNetV2": {"depth_multiplier": 0.125, "min_depth": 4, "depth_divisible_by": 4},
    "SwiftFormer": {"embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
}
LEFT = {"SwiftFormer": 1}


def model_of(family):
    """A model of transformers in evaluation mode with planted batch norms."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family], num_labels=5)
    model = getattr(transformers, f"{family}ForImageClassification")(config).eval()
    for number, module in enumerate(model.modules()):
        if isinstance(module, nn.BatchNorm2d):
            planted(module, number).float()
    return model


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """(source, result) of a ResNet on disk."""
    folder = tmp_path_factory.mktemp("resnet")
    model_of("ResNet").save_pretrained(folder / "source")
    fold(folder / "source", folder / "result", operations=["batchnorm"])
    return folder / "source", folder / "result"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_holds_the_bits_of_nk_fold_and_its_class_computes_the_same(family, tmp_path):
    model = model_of(family)
    model.save_pretrained(tmp_path / "source")
    # Nothing is named: the folder has batch norms.
    certificate = fold(tmp_path / "source", tmp_path / "result")
    assert certificate.operations == ("batchnorm",)
    assert verify(tmp_path / "source", tmp_path / "result").passed
    loaded = type(model).from_pretrained(tmp_path / "result")
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    expected, found = (copy.deepcopy(each).double()(x).logits for each in (model, loaded))
    folding = nk.fold(model, batch=x)
    left = [norm.name for norm in folding.plan.norms if not norm.readers]
    assert len(left) == LEFT.get(family, 0)
    assert [norm["name"] for norm in certificate.plan["norms"] if not norm["readers"]] == left
    # Each weight is off by half a unit of float32, each norm by a quarter; `rounding` is the first on this model.
    assert (found - expected).abs().max() <= 8 * folding.proof.rounding
    for norm in folding.plan.norms:
        for path in norm.readers:
            layer, own, stays = (
                each.get_submodule(name) for each, name in ((model, path), (loaded, path), (loaded, norm.name))
            )
            assert torch.equal(layer.weight, own.weight)
            assert torch.equal(layer.bias, stays.bias if own.bias is None else own.bias)
            # In float32 what stays is y = x + bias, bit for bit.
            y = torch.randn(1, stays.num_features, 5, 5)
            assert torch.equal(stays(y), y + stays.bias.view(1, -1, 1, 1))
    assert nk.fold(loaded, batch=x).plan.num_folded == folding.plan.num_folded


@pytest.mark.slow
def test_a_second_fold_changes_no_bit_and_float32_is_asked_for_where_a_variance_does_not_fit(resnet, tmp_path):
    source, result = resnet
    again = fold(result, tmp_path / "again", operations=["batchnorm"])
    assert {norm["gain"] for norm in again.plan["norms"]} == {"identity"}
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (result / "model.safetensors").read_bytes()
    transformers.ResNetForImageClassification.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "narrow"
    )
    with pytest.raises(
        InputError, match=r"bfloat16 holds neither a variance of 1 - eps nor small scales .* --dtype float32"
    ):
        fold(tmp_path / "narrow", tmp_path / "no", operations=["batchnorm"])
    assert not list(tmp_path.glob("*no*"))
    fold(tmp_path / "narrow", tmp_path / "wide", operations=["batchnorm"], dtype="float32")
    assert verify(tmp_path / "narrow", tmp_path / "wide").passed
    assert {value.dtype for value in tensors(tmp_path / "wide").values()} == {"F32", "I64"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("resnet.embedder.embedder.convolution.weight", "product"),
        ("resnet.embedder.embedder.normalization.bias", "sum"),
        ("resnet.embedder.embedder.normalization.running_var", "constant"),
        ("resnet.embedder.embedder.normalization.num_batches_tracked", "identical"),
    ],
)
def test_one_flipped_bit_of_any_tensor_is_found(resnet, tmp_path, name, check):
    source, _ = resnet
    result = Path(shutil.copytree(resnet[1], tmp_path / "result"))
    with open_checkpoint(result) as opened:
        place = opened.source.tensors[name]
    flip(place.file, place.start)
    failed = {each.name: each.what for each in verify(source, result).checks if each.passed is False}
    assert set(failed) == {"result files", check}
    assert failed[check].startswith(name)


@pytest.mark.slow
def test_a_file_that_lacks_a_tensor_and_a_class_without_batch_norms_are_refused(resnet, tmp_path):
    from safetensors.torch import load_file, save_file

    source = Path(shutil.copytree(resnet[0], tmp_path / "source"))
    held = load_file(source / "model.safetensors")
    lost = "resnet.embedder.embedder.normalization.running_mean"
    save_file({name: value for name, value in held.items() if name != lost}, source / "model.safetensors")
    with pytest.raises(ModelError, match=f"expected the tensor {lost}, found none"):
        fold(source, tmp_path / "result", operations=["batchnorm"])
    with pytest.raises(InputError, match="found none: frozen or scripted ones are not folded"):
        fold(nk.demo.directory("rmsnorm"), tmp_path / "result", operations=["batchnorm"])
    with pytest.raises(InputError, match="batchnorm is folded alone, got gain, batchnorm"):
        fold(source, tmp_path / "result", operations=["gain", "batchnorm"])
    with pytest.raises(InputError, match="a folded one no longer normalizes"):
        fold(source, tmp_path / "result", for_training=True)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Wav2Vec2ConformerModel", "ParakeetEncoder"])
def test_models_of_sound_fold_too_also_where_one_does_not_run_without_values(name, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    convolutions = {"conv_dim": (8,) * 7, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    class_ = getattr(transformers, name)
    model = class_(class_.config_class(**sizes, **(convolutions if name.startswith("Wav") else {}))).eval()
    (norm,) = (module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    planted(norm).float()
    model.save_pretrained(tmp_path / "source")
    certificate = fold(tmp_path / "source", tmp_path / "result")
    assert [norm["gain"] for norm in certificate.plan["norms"]] == ["folded"]
    x = torch.randn(2, 8000) if name.startswith("Wav") else torch.randn(2, 64, model.config.num_mel_bins)
    expected, found = (
        copy.deepcopy(each).double()(x.double()).last_hidden_state
        for each in (model, class_.from_pretrained(tmp_path / "result"))
    )
    # A rounding of each weight and bias of one convolution, in outputs of a LayerNorm of 16 features.
    assert (found - expected).abs().max() <= 16 * 2.0**-23 * expected.abs().max()


def chain(*layers):
    model = nn.Sequential(*layers).double().eval()
    for number, module in enumerate(model):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            planted(module, number)
    return model


# Layers, and the reason why the norm stays, or "" if it is folded.
CHAINS = {
    "before, with a bias": ([nn.Conv2d(3, 6, 3, padding=1, groups=3), nn.BatchNorm2d(6)], ""),
    "before, transposed": ([nn.ConvTranspose2d(3, 6, 3), nn.BatchNorm2d(6)], ""),
    "after, a convolution": ([nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 6, (3, 2))], ""),
    "after, a linear map": ([nn.ReLU(), nn.BatchNorm1d(3), nn.Linear(3, 6)], ""),
    "after, padded": ([nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 6, 3, padding=1)], "pads zeros"),
    "after, padded by reflection": (
        [nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect")],
        "",
    ),
    "after, without a bias": ([nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 6, 3, bias=False)], "2 has no bias for its"),
    "after, in groups": ([nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 6, 3, groups=3)], "2 has groups, and on disk"),
    "after, transposed": ([nn.ReLU(), nn.BatchNorm2d(3), nn.ConvTranspose2d(3, 6, 1)], "2 is transposed, and on disk"),
    "before, transposed in groups": ([nn.ConvTranspose2d(3, 6, 3, groups=3), nn.BatchNorm2d(6)], "0 has groups"),
    "no bias anywhere": ([nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6, affine=False)], "0 has no bias for its"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_each_tensor_is_that_of_the_fold_in_memory_or_the_reason_is_given(name, monkeypatch, tmp_path):
    layers, reason = CHAINS[name]
    model = chain(*copy.deepcopy(layers))
    monkeypatch.setattr(batch_norm_files, "empty_model", lambda *_: copy.deepcopy(model).to("meta"))
    opened = OpenedFolder(
        config={"model_type": "x", "architectures": ["X"]}, source=ModelSource(model), folder=tmp_path, states={}
    )
    plan = make_plan(opened, operations=["batchnorm"])
    if reason:
        with pytest.raises(InputError, match="nothing of what was asked can be done") as raised:
            plan.require_change()
        assert reason in str(raised.value)
        return
    made = vectors(plan, opened.source, Workers())
    state = {
        edit.name: torch.cat([part.flatten() for part in contents(edit, opened.source, made, Outcome())])
        for edit in plan.edits
    }
    result = copy.deepcopy(model)
    result.load_state_dict({key: state[key].view(value.shape) for key, value in model.state_dict().items()})
    x = torch.randn(4, 3, *([9, 9] if isinstance(layers[1], nn.BatchNorm2d) else []), dtype=torch.float64)
    expected = model(x)
    # Roundings of sums of at most 54 products, and of variance + eps.
    assert (result(x) - expected).abs().max() <= 1e-13 * expected.abs().max()
    nk.fold(model, batch=x)
    for number, layer in enumerate(model):
        if not isinstance(layer, (nn.Identity, nn.ReLU)):
            assert torch.equal(result[number].weight, layer.weight)
            assert (result[number].bias - layer.bias).abs().max() <= 1e-14 * layer.bias.abs().max()
