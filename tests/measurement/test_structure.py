"""What one forward pass says a model is made of."""

from __future__ import annotations

import importlib
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit import inspect
from normkit.measurement.running import evaluating, runner
from normkit.measurement.structure import survey


class Shared(nn.Module):
    """One norm module at two places, and a norm called as a function."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.linear(self.norm(x))
        return F.rms_norm(self.norm(x), (8,))


def surveyed(model, x, progress=None):
    with evaluating(model), torch.no_grad():
        return survey(model, lambda: model(x), progress)


@pytest.mark.slow
def test_norms_blocks_and_roles_of_a_model_that_ships(twins):
    ids = torch.arange(16)[None]
    structure = surveyed(twins["layernorm"], ids)
    assert len(structure.sites) == 13
    assert [block.path for block in structure.blocks] == [f"transformer.h.{index}" for index in range(6)]
    assert len(structure.sweeps) == len(structure.blocks)
    assert {sweep.placement for sweep in structure.sweeps} == {"pre"}
    assert structure.final_norm == "transformer.ln_f"
    assert structure.roles["transformer.h.0.ln_1"] == "pre"
    assert set(structure.forward_calls.values()) == {1}


@pytest.mark.slow
def test_calls_of_one_forward_pass_are_counted_by_norm():
    structure = surveyed(Shared(), torch.randn(2, 3, 8))
    assert structure.forward_calls == {"norm": 2, ":rms_norm": 1}


@pytest.mark.slow
def test_the_stages_are_told_in_order():
    stages = []
    surveyed(Shared(), torch.randn(2, 3, 8), lambda stage, done, total: stages.append((stage, done, total)))
    assert stages == [("structure", 0, 3), ("norms", 1, 3), ("placement", 2, 3)]


def test_norms_that_no_spec_describes_keep_their_passport():
    structure = surveyed(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(4, 8))
    (other,) = structure.others
    assert (other.path, other.passport.verdict) == ("1", "batch")
    assert other.reason.startswith("BatchNorm1d: batch norm")


pytestmark = pytest.mark.slow


class Taking(nn.Module):
    """A model of x-transformers that takes its tokens by name."""

    def __init__(self, kind, options):
        super().__init__()
        library = importlib.import_module("x_transformers")
        torch.manual_seed(0)
        layers = getattr(library, kind)(dim=64, depth=2, heads=2, attn_dim_head=32, **options)
        self.inner = library.TransformerWrapper(num_tokens=99, max_seq_len=64, attn_layers=layers)
        # A gain has to differ from 1 for what it does to be seen.
        for name, parameter in self.named_parameters():
            if name.endswith((".gamma", ".g")):
                parameter.data += 0.1 * torch.randn_like(parameter)

    def forward(self, input_ids):
        return self.inner(input_ids)


IDS = {"input_ids": torch.randint(0, 99, (2, 20), generator=torch.Generator().manual_seed(0))}
CASES = {
    "pre": ("Decoder", {}, ["pre"], "final"),
    "an encoder": ("Encoder", {}, ["pre"], "final"),
    "RMSNorm": ("Decoder", {"use_rmsnorm": True}, ["pre"], "final"),
    "RMSNorm without a gain": ("Decoder", {"use_simple_rmsnorm": True}, ["pre"], "final"),
    "post": ("Decoder", {"pre_norm": False}, ["post"], None),
    "sandwich": ("Decoder", {"sandwich_norm": True}, ["pre", "output"], "final"),
}
PLACEMENTS = {"sandwich": "peri", "post": "post"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_where_the_norms_of_x_transformers_sit(name):
    """A pre-norm decoder was read as post-norm: its norms, which a list holds, were taken for its blocks."""
    kind, options, roles, last = CASES[name]
    inspection = inspect(Taking(kind, options).eval(), IDS)
    assert [block.path for block in inspection.blocks] == [f"inner.attn_layers.layers.{index}" for index in range(4)]
    assert {block.placement for block in inspection.blocks} == {PLACEMENTS.get(name, "pre")}
    expected = roles * 4 + ([last] if last else [])
    assert [site.role for site in inspection.sites] == expected
    assert (inspection.final_norm is None) == (last is None)
    assert [each.rule for each in inspection.findings if each.severity != "note"] == []
    assert [site.block for site in inspection.sites][: len(roles) * 4] == sorted(list(range(4)) * len(roles))


def test_the_stream_of_blocks_that_are_no_modules():
    inspection = inspect(Taking("Decoder", {}).eval(), IDS)
    streams = inspection.blocks
    for site, block in zip(inspection.sites, streams, strict=False):
        assert block.stream_in.rms_quantiles == site.input.rms_quantiles
        assert block.stream_in.rows == 40
    for before, after in pairwise(streams):
        assert before.stream_out.rms_quantiles == after.stream_in.rms_quantiles
    assert all(0.1 < block.branch_share < 2 for block in streams)


def test_blocks_that_do_nothing_are_found_where_they_are_no_modules():
    model = Taking("Decoder", {}).eval()
    with torch.no_grad():
        for index in (2, 3):
            for parameter in model.inner.attn_layers.layers[index][1].parameters():
                parameter.zero_()
    (found,) = [each for each in inspect(model, IDS).findings if each.rule == "F3"]
    assert found.sites == ("inner.attn_layers.layers.2", "inner.attn_layers.layers.3")


def test_the_page_of_such_a_model_is_written(tmp_path):
    page = inspect(Taking("Decoder", {"sandwich_norm": True}).eval(), IDS).write_html(tmp_path / "report.html")
    assert "inner.attn_layers.layers.3" in page.read_text()


def test_a_watch_looks_at_modules_alone():
    model = Taking("Decoder", {}).eval()
    assert survey(model, runner(model, IDS), stages=False).blocks == ()
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
