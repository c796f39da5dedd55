"""Group D on real tiny models: the side of the residual, and norms that are missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2LMHeadModel, T5Config, T5ForConditionalGeneration
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Model

import normkit as nk
from helpers import finding_of
from normkit.inspection.result import infer


class ResidualAfterNorm(GPT2Block):
    """norm(x) + f(norm(x))."""

    def forward(self, hidden_states, *_args, attention_mask=None, **_kwargs):
        x = self.ln_1(hidden_states)
        x = x + self.attn(x, attention_mask=attention_mask)[0]
        x = self.ln_2(x)
        return x + self.mlp(x)


class WithoutLast(GPT2Model):
    """Calls every block and forgets the last norm, which is there."""

    def forward(self, *args, **kwargs):
        norm, self._modules["ln_f"] = self.ln_f, nn.Identity()
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._modules["ln_f"] = norm


class Headed(GPT2LMHeadModel):
    """A port: stock but for its trunk."""

    def __init__(self, config):
        super().__init__(config)
        self.transformer = WithoutLast(config)


def test_a_residual_taken_after_the_norm(models, inspected, finding, status):
    model = models.tiny("GPT2", layers=3)
    assert status(inspected(model), "D1") == "clean"
    for index in (1, 2):
        block = ResidualAfterNorm(model.config, layer_idx=index)
        block.load_state_dict(model.transformer.h[index].state_dict())
        model.transformer.h[index] = block
    found = finding(inspected(model.eval()), "D1")
    assert (found.severity, found.sites) == ("error", ("transformer.h.1", "transformer.h.2"))
    assert found.measured == "2 blocks of 3 add the branch to the normalized stream"


@pytest.mark.parametrize("is_of_first", [True, False])
def test_a_norm_of_the_embedding_in_the_first_block(is_of_first):
    class Block(nn.Module):
        def __init__(self, is_entered):
            super().__init__()
            self.enter = nn.LayerNorm(32) if is_entered else nn.Identity()
            self.norm = nn.Identity() if is_entered else nn.LayerNorm(32)
            self.branch = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

        def forward(self, x):
            x = self.enter(x)
            return x + 2 * self.branch(self.norm(x))

    torch.manual_seed(0)
    # A norm that all blocks have in front of the sum is one on the wrong side.
    model = nn.Sequential(
        nn.Sequential(*(Block(index == 0 or not is_of_first) for index in range(3))), nn.LayerNorm(32)
    )
    found = finding_of(nk.inspect(model, 3 * torch.randn(2, 9, 32)), "D1")
    assert (None if found is None else found.sites) == (None if is_of_first else ("0.0", "0.1", "0.2"))


def test_a_list_of_branches_that_are_added_outside(models, inspected, status):
    class Branches(type(models.plain(layers=3))):
        def forward(self, input_ids):
            x = self.embedding(input_ids)
            for block in self.blocks:
                x = x + block(x)
            return self.head(self.norm(x))

    model = Branches()
    model.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(3))
    inspection = inspected(model)
    assert {block.placement for block in inspection.blocks} == {"residual-after-norm"}
    assert status(inspection, "D1") == "clean"


def test_a_residual_taken_after_the_norm_by_design(models, inspected, status):
    inspection = inspected(models.tiny("Bloom", apply_residual_connection_post_layernorm=True))
    assert {block.placement for block in inspection.blocks} == {"residual-after-norm"}
    assert status(inspection, "D1") == "clean"


class Squared(nn.Module):
    """A norm of another kind: A5 reports it."""

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-5)


def test_a_final_norm_that_is_missing(models, inspected, finding, status):
    model = models.tiny("GPT2", layers=3)
    assert status(inspected(model), "D3") == "clean"
    model.transformer.ln_f = nn.Identity()
    found = finding(inspected(model), "D3")
    assert (found.severity, found.sites) == ("error", ("transformer.ln_f",))
    assert found.measured == "1 norm of GPT2LMHeadModel is missing"
    assert found.evidence[0].endswith("no norm runs here")
    assert "the last block's output rows have an rms from" in found.evidence[1]
    model.transformer.ln_f = Squared()
    rules = {found.rule: found.sites for found in inspected(model).findings}
    assert (rules["A5"], "D3" in rules) == (("transformer.ln_f",), False)
    found = finding(inspected(Headed(model.config).eval()), "D3")
    assert found.sites == ("transformer.ln_f",)
    assert "here it is never called" in found.evidence[0]


@pytest.mark.slow
def test_a_norm_in_a_block_replaced_by_the_identity(models, inspected, finding):
    model = models.tiny("Olmo2")
    model.model.layers[1].post_attention_layernorm = nn.Identity()
    assert finding(inspected(model), "D3").sites == ("model.layers.1.post_attention_layernorm",)


def test_a_norm_called_as_a_function_is_not_missing(models, inspected, status):
    class Functional(GPT2Block):
        def forward(self, hidden_states, *_args, attention_mask=None, **_kwargs):
            x = hidden_states + self.attn(F.layer_norm(hidden_states, (64,)), attention_mask=attention_mask)[0]
            return x + self.mlp(F.layer_norm(x, (64,)))

    model = models.tiny("GPT2", layers=3)
    for index in range(3):
        block = Functional(model.config, layer_idx=index)
        block.ln_1, block.ln_2 = nn.Identity(), nn.Identity()
        model.transformer.h[index] = block
    inspection = inspected(model.eval())
    assert "transformer.h.0:layer_norm" in [site.path for site in inspection.sites]
    assert status(inspection, "D3") == "clean"


@pytest.mark.slow
def test_norms_of_parts_that_do_not_run_are_not_missing(models, inspected, status):
    model = models.tiny("GPT2", layers=3)
    del model.transformer.h[2]
    assert status(inspected(model), "D3") == "clean"
    config = T5Config(vocab_size=99, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    whole = T5ForConditionalGeneration(config).eval()
    whole.forward = whole.encoder.forward
    assert status(inspected(whole), "D3") == "clean"
    assert status(inspected(models.plain(layers=3)), "D3") == "not checked"


def test_declared_norms_that_are_gone(models, inspected, finding, status):
    model = models.plain(layers=3)
    declared = infer(inspected(model), source="intent.json")
    assert status(inspected(model, intent=declared), "D3") == "clean"
    shorter = models.plain(layers=3)
    del shorter.blocks[2]
    assert status(inspected(shorter, intent=declared), "D3") == "clean"
    model.norm, model.blocks[1].norm_2 = nn.Identity(), nn.Identity()
    found = finding(inspected(model, intent=declared), "D3")
    assert (found.severity, found.sites) == ("error", ("blocks.1.norm_2", "norm"))
    assert found.measured == "2 norms of intent.json are missing"
    assert "the last block's output rows have an rms from" in found.evidence[2]


def test_a_declared_final_norm_that_runs_elsewhere(models, inspected, finding):
    class Early(type(models.plain(layers=3))):
        def forward(self, input_ids):
            x = self.norm(self.embedding(input_ids))
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    declared = infer(inspected(models.plain(layers=3)), source="intent.json")
    found = finding(inspected(Early(), intent=declared), "D3")
    assert found.sites == ("norm",)
    assert "declared as the final norm; it runs, but nothing" in found.evidence[0]


def test_a_residual_after_the_norm_is_no_design_that_a_first_run_declares(models, inspected, finding):
    class After(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.norm, self.mlp = block.norm_1, block.mlp

        def forward(self, x):
            x = self.norm(x)
            return x + self.mlp(x)

    model = models.plain(layers=3)
    model.blocks = nn.ModuleList(After(block) for block in model.blocks)
    declared = infer(inspected(model))
    assert set(declared.placements.values()) == {"pre"}
    assert len(finding(inspected(model, intent=declared), "D1").sites) == 3
    meant = replace(declared, placements=dict.fromkeys(declared.placements, "residual-after-norm"))
    assert "D1" not in [found.rule for found in inspected(model, intent=meant).findings]


class Unread(nn.Module):
    """A block that calls its norms and drops what they give; its list may be of several placements."""

    def __init__(self, block, order):
        super().__init__()
        self.norm_1, self.mlp, self.order = block.norm_1, block.mlp, order

    def forward(self, x):
        if self.order == "post":
            return self.norm_1(x + self.mlp(x))
        y = self.norm_1(x)
        return x + self.mlp(x if self.order == "unread" else y)


def reordered(models, order, layers=3):
    """A model whose blocks have these orders: one for all, or one for each index."""
    model = models.plain(layers=layers)
    for index, block in enumerate(model.blocks):
        if (own := order if isinstance(order, str) else order.get(index, "")) != "":
            model.blocks[index] = Unread(block, own)
    return model


def test_a_norm_whose_output_nothing_reads(models, inspected, finding):
    found = finding(inspected(reordered(models, {1: "unread"})), "D3")
    assert (found.severity, found.sites) == ("error", ("blocks.1.norm_1",))
    assert "nothing reads its output" in found.evidence[0]


@pytest.mark.slow
def test_a_pre_norm_stack_of_an_unknown_model_without_a_final_norm(models, inspected, finding, status):
    model = models.plain(layers=3)
    model.norm = nn.Identity()
    found = finding(inspected(model), "D3")
    assert (found.severity, found.sites) == ("note", ("blocks.2",))
    assert "no norm is behind the last block" in found.evidence[0]
    model.head = nn.Sequential(nn.LayerNorm(64), model.head)
    # Post-norm blocks need none.
    post = reordered(models, "post")
    post.norm = nn.Identity()
    assert status(inspected(model), "D3") == status(inspected(post), "D3") == "not checked"


def test_a_single_block_that_is_placed_unlike_all_others(models, inspected, finding):
    model = reordered(models, {index: "post" if index == 2 else "pre" for index in range(4)}, layers=4)
    found = finding(inspected(model), "D2")
    assert (found.severity, found.sites) == ("warning", ("blocks.2",))
    assert found.evidence[0].startswith("blocks.2: placed as post-norm, the 3 other blocks as pre-norm")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "change", "severity"),
    [(1, "identity", "warning"), (2, None, "warning"), (0, "identity", "note"), (1, "uncalled", "warning")],
)
def test_a_norm_that_all_other_blocks_have(models, inspected, block, change, severity):
    model = models.plain(layers=3)
    assert finding_of(inspected(model), "D3") is None
    chosen = model.blocks[block]
    if change == "uncalled":
        chosen.forward = lambda x: x + chosen.mlp(chosen.norm_1(x))
    elif change == "identity":
        chosen.norm_2 = nn.Identity()
    else:
        chosen.norm_2, chosen.forward = None, lambda x: x + chosen.mlp(chosen.norm_1(x))
    found = finding_of(inspected(model), "D3")
    assert (found.severity, found.sites) == (severity, (f"blocks.{block}.norm_2",))
    assert found.evidence[0].endswith("one runs in each of 2 other modules of its class")


class Cells(nn.Module):
    """A recurrence of two cells, the norm of the second of which may be left out."""

    def __init__(self, last=None):
        super().__init__()
        self.cells = nn.ModuleList(Cell(last if index else None) for index in range(2))

    def forward(self, x):
        state = torch.zeros(len(x), 16)
        for step in x.unbind(1):
            for cell in self.cells:
                state = cell(step, state)
        return state


class Cell(nn.Module):
    def __init__(self, norm=None):
        super().__init__()
        self.enter, self.back, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), norm or nn.LayerNorm(16)

    def forward(self, x, state):
        return torch.tanh(self.norm(self.enter(x) + self.back(state)))


def test_a_norm_that_one_of_two_cells_lacks():
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    assert finding_of(nk.inspect(Cells(), x), "D3") is None
    found = finding_of(nk.inspect(Cells(nn.Identity()), x), "D3")
    assert (found.severity, found.sites) == ("note", ("cells.1.norm",))
    # A cell that another kind of module completes is not compared; nor is one that lacks other parts as well.
    assert finding_of(nk.inspect(Cells(nn.Tanh()), x), "D3") is None
    model = Cells(nn.Identity())
    model.cells[0].probe = nn.Linear(1, 1)
    assert finding_of(nk.inspect(model, x), "D3") is None
