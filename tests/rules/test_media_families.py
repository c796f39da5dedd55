"""Untrained models of images and of sound are clean, and their rows are named."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers
from torch import nn

import normkit as nk
from media_models import MODELS, OTHERS, media_model, other_model

# Whole models of transformers.
pytestmark = pytest.mark.slow

_BATCH_NORMS = ("ResNet", "RegNet", "MobileNet")
_ROWS = {
    **{key: {"patch": 5} for key in ("ViT", "DeiT", "DINOv2")},
    "CLIP": {"patch": 5, "image": 1},
    "SigLIP": {"patch": 5, "image": 1},
    "Swin": {"patch": 11},
    "ConvNeXt": {"pixel": 6, "image": 1},
    "DETR": {"patch": 4, "query": 7},
    "Whisper": {"frame": 5, "token": 7},
    "Wav2Vec2": {"channel": 1, "frame": 6},
    "Wav2Vec2-large": {"frame": 8},
}
_PLACEMENTS = {
    **{key: {"pre": 2} for key in ("ViT", "DeiT", "DINOv2", "CLIP", "SigLIP", "Wav2Vec2-large")},
    **{key: {"pre": 4} for key in ("Swin", "Whisper")},
    "Wav2Vec2": {"post": 2},
    "ConvNeXt": {"in-branch": 4},
    # The only other blocks change the sizes of their maps.
    **{key: {"in-branch": 1} for key in ("ResNet", "RegNet")},
    "DETR": {"in-branch": 1, "post": 3, "unknown": 1},
    "MobileNet": {},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", MODELS)
def test_untrained_models_are_clean(family):
    model, batch = media_model(family)
    inspection = nk.inspect(model, batch)
    assert [(found.rule, found.evidence) for found in inspection.findings if found.severity != "note"] == []
    assert (inspection.model.tokens, inspection.model.unit) == (2, "image" if MODELS[family][1] else "recording")
    assert dict(Counter(site.row for site in inspection.sites)) == _ROWS.get(family, {})
    if family in _PLACEMENTS:
        assert dict(Counter(block.placement for block in inspection.blocks)) == _PLACEMENTS[family]
    if family in _BATCH_NORMS:
        assert all("batch norm" in reason for _, reason in inspection.unrecognised)
        assert inspection.unrecognised


_FURTHER: dict[str, tuple[dict[str, int], dict[str, int], str | None]] = {
    "CLIP, both towers": ({"patch": 5, "image": 1, "token": 5}, {"pre": 4}, "text_model.final_layer_norm"),
    "SigLIP, both towers": ({"patch": 5, "image": 1, "token": 5}, {"pre": 4}, "text_model.final_layer_norm"),
    # Picks the states of one block by their place in the run.
    "LLaVA": ({"patch": 5, "image": 1, "token": 5}, {"pre": 4}, "model.language_model.norm"),
    "Qwen2.5-VL": ({"patch": 5, "token": 5}, {"pre": 4}, "model.language_model.norm"),
    "Gemma 3": ({"patch": 6, "image": 1, "token": 13}, {"pre": 2, "peri": 2}, "model.language_model.norm"),
    "PaliGemma": ({"patch": 5, "image": 1, "token": 5}, {"pre": 4}, "model.language_model.norm"),
    "DiT": ({"patch": 5}, {"pre": 2}, "norm"),
    "UNet": ({"channel group": 9}, {"pre": 2}, None),
    "Mamba": ({"token": 3}, {"pre": 2}, "backbone.norm_f"),
    # The first block normalizes the embeddings before anything else.
    "RWKV": ({"token": 6}, {"pre": 2}, "rwkv.ln_out"),
    # No residual connection: there is no stream to place norms beside.
    "LSTM": ({"token": 7}, {"unknown": 2}, "norm"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", OTHERS)
def test_models_of_several_inputs_or_without_attention_are_clean(family):
    model, batch = other_model(family)
    inspection = nk.inspect(model, batch)
    assert [(found.rule, found.evidence) for found in inspection.findings if found.severity != "note"] == []
    assert {site.role for site in inspection.sites if site.row == "image"} <= {"final", "unknown"}
    rows, placements = (
        dict(Counter(each))
        for each in ((site.row for site in inspection.sites), (block.placement for block in inspection.blocks))
    )
    assert (rows, placements, inspection.final_norm) == _FURTHER[family]


@pytest.mark.parametrize(
    ("plant", "rule"),
    [
        (lambda norm: norm.weight.fill_(float("nan")), "E3"),
        (lambda norm: norm.weight.zero_(), "B5"),
        (lambda norm: setattr(norm, "eps", 1.0), "A1"),
    ],
    ids=["NaN", "zeroed", "eps"],
)
def test_a_fault_in_a_model_of_images_is_named_and_placed(plant, rule):
    model, batch = media_model("ViT")
    with torch.no_grad():
        plant(model.get_submodule("layers.1.layernorm_after"))
    found = {finding.rule: finding for finding in nk.inspect(model, batch).findings if finding.severity != "note"}
    assert "layers.1.layernorm_after" in found[rule].sites


def test_one_block_of_maps_that_adds_nothing_and_one_without_its_norm():
    torch.manual_seed(0)
    sizes = {"hidden_sizes": [8, 16], "depths": [3, 3], "num_stages": 2, "layer_scale_init_value": 1.0}
    model = transformers.ConvNextModel(transformers.ConvNextConfig(**sizes)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    batch = {"pixel_values": torch.randn(2, 3, 32, 32)}
    inspection = nk.inspect(model, batch)
    assert [found.rule for found in inspection.findings] == []
    # A block's rows are the pixels of two images: 8 * 8 in the first stage, 4 * 4 in the second.
    assert [(each.stream_out.rows, each.stream_out.features) for each in inspection.blocks] == [
        *[(128, 8)] * 3,
        *[(32, 16)] * 3,
    ]
    block = model.get_submodule("encoder.stages.1.layers.1")
    with torch.no_grad():
        block.layer_scale_parameter.zero_()
    found = nk.inspect(model, batch).findings
    assert [(each.rule, each.severity, each.sites) for each in found] == [
        ("F3", "warning", ("encoder.stages.1.layers.1",))
    ]


class WithBatchNorms(nn.Module):
    """A residual block of convolutions, before (He et al. 2016b) or behind each of which a batch norm stands."""

    def __init__(self, is_pre: bool, is_residual: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.is_pre, self.is_residual = is_pre, is_residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_pre:
            return x + self.second(self.norm2(self.first(self.norm1(x).relu())).relu())
        branch = self.norm2(self.second(self.norm1(self.first(x)).relu()))
        return (x + branch if self.is_residual else branch).relu()


@pytest.mark.parametrize(
    ("is_pre", "is_residual", "placement"),
    [(True, True, "pre"), (False, True, "in-branch"), (False, False, "unknown")],
)
def test_the_place_of_batch_norms(is_pre, is_residual, placement):
    torch.manual_seed(0)
    blocks = nn.Sequential(*(WithBatchNorms(is_pre, is_residual) for _ in range(6)))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), blocks, nn.BatchNorm2d(8)).train()
    batch = torch.randn(16, 3, 10, 10)
    with torch.no_grad():
        for _ in range(60):
            model(batch)
    inspection = nk.inspect(model.eval(), batch)
    assert [block.placement for block in inspection.blocks] == [placement] * 6
    assert [found.rule for found in inspection.findings if found.severity != "note"] == []
    assert {"D3", "D7"}.isdisjoint(found.rule for found in inspection.findings)


def test_any_module_with_any_images():
    """GroupNorm, InstanceNorm and a LayerNorm over all of an image, in a module of one's own."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.GroupNorm(8, 8), nn.LayerNorm((8, 6, 6))]
    inspection = nk.inspect(nn.Sequential(*layers), torch.randn(4, 3, 8, 8))
    assert [site.row for site in inspection.sites] == ["channel group", "channel", "image"]
    assert [finding.rule for finding in inspection.findings if finding.severity != "note"] == []


class Coupled(nn.Module):
    """Takes the mean over the samples away, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm, self.is_faulty = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.map(x))
        return y - y.mean(0, keepdim=True) if self.is_faulty else y


def test_coupled_samples_are_seen_on_images():
    torch.manual_seed(0)
    model, batch = Coupled(), torch.randn(3, 3, 8, 8)
    notes = {finding.rule for finding in nk.inspect(model, batch).findings}
    model.is_faulty = False
    inspection = nk.inspect(model, batch)
    assert ("C5" in notes, "C5" in {finding.rule for finding in inspection.findings}) == (True, False)
    reasons = {check.rule: (check.status, check.reason) for check in inspection.checks}
    assert reasons["C5"] == ("clean", "")
    assert reasons["C4"] == reasons["C6"] == ("not checked", "an image has no later tokens and no padding")


def test_rows_of_numbers_are_counted_as_samples():
    model = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8))
    facts = nk.inspect(model, [torch.randn(5, 16), torch.randn(3, 16)]).model
    assert (facts.tokens, facts.unit) == (8, "sample")
    facts = nk.inspect(model, torch.randn(5, 3, 16)).model
    assert (facts.tokens, facts.unit) == (15, "token")


def test_one_block_with_its_norm_behind_the_sum_is_named():
    """The block has norms on both sides, so that it has no placement of its own: each norm tells."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
    model = transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=4, **sizes)).eval()
    batch = {"pixel_values": torch.randn(2, 3, 32, 32)}
    assert "D2" not in {finding.rule for finding in nk.inspect(model, batch).findings}
    layer = model.layers[2]

    def forward(hidden_states, *_args, **_kwargs):
        given = layer.attention(layer.layernorm_before(hidden_states))
        hidden_states = hidden_states + (given[0] if isinstance(given, tuple) else given)
        return layer.layernorm_after(hidden_states + layer.mlp(hidden_states))

    layer.forward = forward
    found = {finding.rule: finding for finding in nk.inspect(model, batch).findings}["D2"]
    assert (found.severity, found.sites) == ("warning", ("layers.2",))
    assert (
        "layers.2.layernorm_after stands in the stream, behind the sum, elsewhere it stands before" in found.evidence[0]
    )


def test_frozen_batch_norms_are_counted():
    model, batch = media_model("DETR")
    generator = torch.Generator().manual_seed(0)
    frozen = {path: part for path, part in model.named_modules() if hasattr(part, "running_mean")}
    with torch.no_grad():
        for part in frozen.values():
            part.running_mean.normal_(generator=generator)
            part.running_var.uniform_(0.5, 2.0, generator=generator)
    inspection = nk.inspect(model, batch)
    assert {norm.path for norm in inspection.batch_norms} == {*frozen}
    assert {(norm.eps, norm.share) for norm in inspection.batch_norms} == {(1e-5, 0.0)}
    assert "C8" not in {finding.rule for finding in inspection.findings}
