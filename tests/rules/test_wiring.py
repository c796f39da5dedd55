"""Group D against what was declared, on real tiny models: other places, shared, doubled and overwriting norms."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import finding_of
from normkit.inspection.result import infer
from normkit.measurement.intent import Intent
from normkit.measurement.patches import find_shared
from normkit.measurement.structure import survey
from normkit.rules.wiring import shared_norm

WIDTH = 64


class Sublayers(nn.Module):
    """Two sublayers with a norm each: behind the sum (post) or on the branch only (output-only)."""

    def __init__(self, post):
        super().__init__()
        self.post = post
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        for branch, norm in ((self.attention, self.norm_1), (self.mlp, self.norm_2)):
            x = norm(x + branch(x)) if self.post else x + norm(branch(x))
        return x

    def attention(self, x):
        query, key, value = self.query_key_value(x)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0]


def placed(models, post):
    model = models.plain()
    model.blocks = nn.ModuleList(Sublayers(post) for _ in range(3))
    return model


# D2.


@pytest.mark.slow
def test_a_norm_on_the_branch_where_post_was_meant(models, inspected, finding, status):
    post, branch = placed(models, post=True), placed(models, post=False)
    assert status(inspected(branch), "D2") == "not checked"
    declared = infer(inspected(post), source="intent.json")
    assert set(declared.placements.values()) == {"post"}
    assert status(inspected(post, intent=declared), "D2") == "clean"
    found = finding(inspected(branch, intent=declared), "D2")
    assert (found.severity, found.sites) == ("error", ("blocks.0", "blocks.1", "blocks.2"))
    assert "intent.json declares post, its norms are placed as in output-only" in found.evidence[0]


# D4.


class Shared(nn.Module):
    """Attention and MLP behind one and the same norm."""

    def __init__(self, block):
        super().__init__()
        self.norm, self.query_key_value, self.mlp = block.norm_1, block.query_key_value, block.mlp

    def forward(self, x):
        query, key, value = self.query_key_value(self.norm(x))[:, None].chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0]
        return x + self.mlp(self.norm(x))


@pytest.mark.slow
def test_a_norm_that_is_called_twice(models, inspected, finding, status):
    model = models.plain()
    declared = infer(inspected(model))
    assert status(inspected(model), "D4") == "clean"
    model.blocks[1] = Shared(model.blocks[1])
    inspection = inspected(model)
    found = finding(inspection, "D4")
    assert (found.severity, found.sites) == ("warning", ("blocks.1.norm",))
    assert found.evidence == ("blocks.1.norm: called 2 times in one pass, the module around it once",)
    assert status(inspected(model, intent=infer(inspection)), "D4") == "clean"
    # More often than declared.
    model = models.plain()
    model.norm = model.blocks[0].norm_1
    found = finding(inspected(model, intent=declared), "D4")
    assert found.severity == "error"
    assert found.evidence == ("blocks.0.norm_1: called 2 times in one pass, declared is once",)


@pytest.mark.slow
def test_two_norms_of_the_config_that_are_one(models, inspected, finding):
    model = models.tiny("Llama", layers=3)
    model.model.layers[2].input_layernorm = model.model.layers[1].input_layernorm
    inspection = inspected(model)
    found = finding(inspection, "D4")
    assert (found.severity, found.sites) == ("error", ("model.layers.1.input_layernorm",))
    assert "serves model.layers.2.input_layernorm too" in found.evidence[0]
    # It is no design that a first run could declare.
    assert finding(inspected(model, intent=infer(inspection)), "D4").severity == "error"


def test_two_modules_with_one_weight(models, inspected, finding):
    model = models.plain()
    model.blocks[0].norm_2.weight = model.blocks[0].norm_1.weight
    found = finding(inspected(model), "D4")
    assert found.sites == ("blocks.0.norm_1", "blocks.0.norm_2")
    assert found.evidence[0] == "blocks.0.norm_1: shares its parameters with blocks.0.norm_2"


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Cohere", None])
def test_parallel_branches_and_repeated_blocks_share_by_design(models, inspected, status, family):
    model = models.plain() if family is None else models.tiny(family)
    if family is None:
        model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    assert status(inspected(model), "D4") == "clean"


@pytest.mark.slow
def test_norms_that_the_stock_class_ties_itself(models, inspected, facts_of):
    model = models.plain()
    model.blocks[1].norm_1.weight = model.blocks[0].norm_1.weight
    paths = frozenset(("blocks.0.norm_1", "blocks.1.norm_1"))
    ids = torch.arange(16)[None]
    with torch.no_grad():
        shared = find_shared(model, survey(model, lambda: model(ids)))
    facts = replace(facts_of(inspected(model), model), shared=shared)
    separate = Intent(source="Stock", specs={site.path: site.spec for site in facts.sites})
    assert shared_norm.check(replace(facts, intent=separate)).severity == "error"
    tied = replace(separate, tied=(paths,), stock=frozenset((*paths, "blocks.0", "blocks.1")))
    assert shared_norm.check(replace(facts, intent=tied)) is None


# D5.


@pytest.mark.slow
def test_a_norm_of_normalized_rows_in_a_block(models, inspected, finding, status):
    model = models.plain()
    assert status(inspected(model), "D5") == "clean"
    model.blocks[1].norm_2 = nn.Sequential(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH))
    inspection = inspected(model)
    found = finding(inspection, "D5")
    assert (found.severity, found.sites) == ("warning", ("blocks.1.norm_2.1",))
    assert "blocks.1.norm_2.1: the output of blocks.1.norm_2.0 already has rows of rms" in found.evidence[0]
    assert status(inspected(model, intent=infer(inspection)), "D5") == "clean"


@pytest.mark.slow
def test_norms_that_follow_norms_elsewhere(models, inspected, status):
    model = models.plain()
    model.embedding = nn.Sequential(model.embedding, nn.LayerNorm(WIDTH))
    found = finding_of(inspected(model), "D5")
    assert (found.severity, found.sites) == ("note", ("blocks.0.norm_1",))
    assert status(inspected(models.tiny("Bloom")), "D5") == "clean"
    # The first leaves the mean in, the second takes it out.
    model = models.plain()
    model.embedding.weight.data += 1.0
    model.blocks[0].norm_1 = nn.Sequential(nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH))
    assert status(inspected(model), "D5") == "clean"


def test_two_norms_in_a_row_with_a_gain_between_come_before_their_equal_gains(models, inspected):
    model = models.train(models.plain())
    model.blocks[1].norm_2 = nn.Sequential(model.blocks[1].norm_2, copy.deepcopy(model.blocks[1].norm_2))
    found = [each for each in inspected(model).findings if each.rule in ("D5", "B14")]
    assert (found[0].rule, found[0].severity, found[0].sites) == ("D5", "error", ("blocks.1.norm_2.1",))
    assert "with only a gain between them" in found[0].evidence[0]


# D6.


class InPlace(nn.LayerNorm):
    """Works on x.float(), which is x where that is float32; or on x itself, whatever its dtype."""

    def __init__(self, width, always):
        super().__init__(width)
        self.always = always

    def forward(self, x):
        rows = x if self.always else x.float()
        return rows.copy_(super().forward(x)).to(x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "always", "severity"),
    [(torch.float32, False, "error"), (torch.bfloat16, False, "warning"), (torch.bfloat16, True, "error")],
)
def test_a_norm_that_overwrites_its_input(models, inspected, dtype, always, severity):
    model = models.train(models.plain()).to(dtype)
    assert finding_of(inspected(model), "D6") is None
    trained, model.blocks[1].norm_1 = model.blocks[1].norm_1, InPlace(WIDTH, always).to(dtype)
    model.blocks[1].norm_1.load_state_dict(trained.state_dict())
    found = inspected(model).findings[0]
    assert (found.rule, found.severity, found.sites) == ("D6", severity, ("blocks.1.norm_1",))
    assert "the call changes its own input" in found.evidence[0]
    assert found.evidence[0].endswith("in float32 and bfloat16 and float16") == always


class Unsteady(nn.Module):
    """Adds what the call before left, as a buffer does that nobody clears."""

    def __init__(self, width, share):
        super().__init__()
        self.weight, self.share, self.last = nn.Parameter(torch.ones(width)), share, 0.0

    def forward(self, x):
        rows = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        y = rows * self.weight + self.share * self.last
        self.last = rows.mean()
        return y


class Noise(nn.Module):
    def forward(self, x):
        return torch.dropout(x, 0.1, True)


class Drawn(nn.Module):
    def forward(self, x):
        return torch.rand_like(x)


@pytest.mark.slow
def test_a_norm_that_keeps_something_between_calls(models, inspected):
    model = models.plain()
    model.blocks[1].norm_1 = Unsteady(WIDTH, 0.1)
    found = finding_of(inspected(model), "D6")
    assert (found.severity, found.sites) == ("error", ("blocks.1.norm_1",))
    assert "the same input gives different outputs" in found.evidence[0]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "module"),
    [("norm_1", Unsteady(WIDTH, 0.0)), ("mlp", Noise()), ("mlp", Drawn())],
    ids=["", "noise", "drawn"],
)
def test_a_steady_norm_and_modules_that_are_none_are_left_alone(models, inspected, path, module):
    model = models.plain()
    setattr(model.blocks[1], path, module)
    assert finding_of(inspected(model), "D6") is None


def test_a_norm_that_is_called_on_its_own_output(models, inspected):
    """The stock model keeps its wiring; what is behind it calls the final norm once more."""

    class Head(nn.Module):
        def __init__(self, norm, head):
            super().__init__()
            self.norm, self.head = norm, head

        def forward(self, x):
            return self.head(self.norm(x))

    model = models.train(models.tiny("GPT2"))
    assert finding_of(inspected(model), "D5") is None
    model.lm_head = Head(model.transformer.ln_f, model.lm_head)
    found = finding_of(inspected(model), "D5")
    assert (found.severity, found.sites) == ("error", ("transformer.ln_f",))
    assert "one norm is applied twice in a row" in found.evidence[0]


def test_a_norm_that_computes_twice(models, inspected):
    class Twice(nn.LayerNorm):
        def forward(self, x):
            return super().forward(super().forward(x))

    model = models.train(models.plain())
    model.norm = Twice(WIDTH)
    found = finding_of(inspected(models.train(model)), "D5")
    assert (found.severity, found.sites) == ("error", ("norm",))
    assert "it is applied twice" in found.evidence[0]
