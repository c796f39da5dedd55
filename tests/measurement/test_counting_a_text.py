from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit.errors import InputError
from normkit.measurement.row_counters import RowCounter, TableReader, Tables, row_tables
from normkit.measurement.sampling import Probe
from normkit.measurement.structure import survey
from normkit.spec import NormSpec

WIDTH, BATCH, TOKENS = 16, 3, 10
MASK = torch.arange(TOKENS) < torch.tensor([[4], [TOKENS], [7]])


class Block(nn.Module):
    """A module norm before attention over heads, a norm called as a function before an MLP."""

    def __init__(self):
        super().__init__()
        self.norm, self.projections = nn.LayerNorm(WIDTH, eps=1e-3), nn.Linear(WIDTH, 3 * WIDTH)
        self.query_norm, self.output, self.mlp = nn.RMSNorm(4), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        heads = (part.unflatten(-1, (4, 4)) for part in self.projections(self.norm(x)).chunk(3, -1))
        query, key, value = (part.transpose(1, 2) for part in heads)
        attended = F.scaled_dot_product_attention(self.query_norm(query), key, value, attn_mask=mask)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        flat = F.rms_norm(x.flatten(0, 1), (WIDTH,), eps=1e-6)
        return x + self.mlp(flat).view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.unused = nn.LayerNorm(WIDTH)

    def forward(self, x, mask=None, finish=False):
        for layer in self.layers:
            x = layer(x, None if mask is None else mask[:, None, None])
        return self.unused(x) if finish else x


class Probed:
    """A probe, and its facts by path."""

    def __init__(self, model, *args, **kwargs):
        with torch.no_grad():
            self.structure = survey(model, lambda: model(*args, **kwargs))
        self.probe = Probe(model, self.structure.layout(is_pooled=False))

    def __enter__(self):
        self.probe.__enter__()
        return self

    def __exit__(self, *error):
        self.probe.__exit__(*error)

    def batch(self, mask):
        self.probe.batch(mask)

    def sites(self):
        return {site.path: site for site in self.probe.measured().sites(self.structure, {})}

    def streams(self, index):
        block = self.probe.measured().blocks(self.structure)[index]
        return block.stream_in, block.stream_out

    def attentions(self):
        return self.probe.measured().attentions()


def kept(model, x, mask):
    """Inputs and outputs by path: what the probe must not keep."""
    tensors = {}

    def keep(name):
        return lambda _module, args, output: tensors.update({name: (args[0], output)})

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    model(x, mask)
    for handle in handles:
        handle.remove()
    return tensors


def statistics(*tensors):
    tables = Tables(row_tables(1), torch.device("cpu"))
    counter = RowCounter(place=0, spec=NormSpec(), enters_norm=False)
    for tensor in tensors:
        counter.add(tables, tensor, None)
    return TableReader(step=0, tables=tables.read()).rows(0, tensors[0].shape[-1])


@pytest.mark.slow
@torch.no_grad()
def test_what_enters_and_leaves_every_norm_and_block():
    model = Model()
    first, second = torch.randn(BATCH, TOKENS, WIDTH), 3 + torch.randn(1, 5, WIDTH)
    probe = Probed(model, first)
    with probe:
        for x in (first, second):
            probe.batch(None)
            model(x)
    runs = [kept(model, x, None) for x in (first, second)]
    for path in ("layers.0.norm", "layers.1.norm", "layers.0.query_norm", "layers.1.query_norm"):
        measured = probe.sites()[path]
        assert measured.input == statistics(*(run[path][0] for run in runs))
        assert measured.output == statistics(*(run[path][1] for run in runs))
        assert (measured.calls, measured.dtype) == (2, "float32")
    for index in range(2):
        entering, leaving = probe.streams(index)
        assert entering == statistics(*(run[f"layers.{index}"][0] for run in runs))
        assert leaving == statistics(*(run[f"layers.{index}"][1] for run in runs))
    assert probe.sites()["layers.1:rms_norm"].output == statistics(*(run["layers.1.mlp"][0] for run in runs))


@pytest.mark.slow
@torch.no_grad()
def test_padding_enters_nothing():
    model, x = Model(), torch.randn(BATCH, TOKENS, WIDTH)
    probe = Probed(model, x)
    poisoned = x.clone()
    # The norms see it; no statistic may.
    poisoned[~MASK] = 1e6
    with probe:
        probe.batch(MASK)
        model(poisoned, MASK)
    run = kept(model, x, MASK)
    rows = {path: [tensor[MASK] for tensor in run[path]] for path in ("layers.0.norm", "layers.1.norm", "layers.1")}
    for path in ("layers.0.norm", "layers.1.norm"):
        measured = probe.sites()[path]
        assert measured.input.rows == int(MASK.sum())
        assert (measured.input, measured.output) == (statistics(rows[path][0]), statistics(rows[path][1]))
    # Over heads, (B, H, T, d); and flattened to (B * T, d).
    heads = run["layers.1.query_norm"][0][MASK[:, None].expand(-1, 4, -1)]
    assert probe.sites()["layers.1.query_norm"].input == statistics(heads)
    assert probe.sites()["layers.0:rms_norm"].input.rows == int(MASK.sum())
    assert probe.sites()["layers.0:rms_norm"].input.absmax < 100
    assert probe.streams(1) == (statistics(rows["layers.1"][0]), statistics(rows["layers.1"][1]))
    for attention in probe.attentions():
        assert attention.bound < 100
        assert attention.sampled_rows == int(MASK.sum()) * 4


@pytest.mark.slow
@torch.no_grad()
def test_a_mask_that_is_all_true_is_no_mask():
    model, x = Model(), torch.randn(BATCH, TOKENS, WIDTH)
    masked = Probed(model, x)
    plain = Probed(model, x)
    with masked:
        masked.batch(torch.ones(BATCH, TOKENS, dtype=torch.bool))
        model(x)
    with plain:
        model(x)
    assert masked.sites() == plain.sites()


@pytest.mark.slow
@torch.no_grad()
def test_all_rows_of_a_tensor_count_whose_tokens_the_mask_does_not_tell():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x):
            return self.norm(x.mean(1))

    model, x = Pooled(), torch.randn(BATCH, TOKENS, WIDTH)
    probe = Probed(model, x)
    with probe:
        probe.batch(MASK)
        model(x)
        probe.batch(None)
        model(x)
    measured = probe.sites()["norm"]
    assert (measured.calls, measured.input.rows, measured.geometry.rows) == (2, 2 * BATCH, 2 * BATCH)


@pytest.mark.slow
@torch.no_grad()
def test_a_norm_that_is_never_called():
    model, x = Model(), torch.randn(BATCH, TOKENS, WIDTH)
    probe = Probed(model, x, finish=True)
    with probe:
        model(x)
    measured = probe.sites()["unused"]
    assert (measured.calls, measured.dtype, measured.input.rows, measured.output.rows) == (0, "", 0, 0)
    assert math.isnan(measured.attenuation.median)
    assert math.isinf(measured.headroom_bits)


@torch.no_grad()
def test_attention_is_told_by_its_module():
    model, x = Model(), torch.randn(BATCH, TOKENS, WIDTH)
    probe = Probed(model, x)
    with probe:
        model(x)
    found = probe.attentions()
    assert [(one.path, one.block, one.source, one.heads, one.head_dim) for one in found] == [
        ("layers.0", 0, "sdpa", 4, 4),
        ("layers.1", 1, "sdpa", 4, 4),
    ]
    assert all(0 < one.sampled_max <= one.bound for one in found)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padded_text_through_transformers(implementation):
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation=implementation,
    )
    model = LlamaModel(config).eval()
    ids = torch.randint(3, 64, (BATCH, TOKENS))
    lengths = MASK.sum(-1).tolist()
    probe = Probed(model, ids, use_cache=False)
    alone = Probed(model, ids, use_cache=False)
    with probe:
        probe.batch(MASK)
        model(ids, attention_mask=MASK.long(), use_cache=False)
    with alone:
        for row, length in zip(ids, lengths, strict=True):
            alone.batch(None)
            model(row[None, :length], use_cache=False)
    # A batch with padding and each text alone are one and the same, but for rounding.
    for padded, single in zip(probe.sites().values(), alone.sites().values(), strict=True):
        assert padded.input.rows == single.input.rows == sum(lengths)
        assert padded.output.mean_energy == pytest.approx(single.output.mean_energy, rel=1e-3)
        assert padded.output.absmax == pytest.approx(single.output.absmax, rel=1e-4)
    assert probe.streams(1)[1].rms_max == pytest.approx(alone.streams(1)[1].rms_max, rel=1e-4)
    assert [one.source for one in probe.attentions()] == [{"eager": "softmax"}.get(implementation, "sdpa")] * 2
    for padded, single in zip(probe.attentions(), alone.attentions(), strict=True):
        assert padded.path.endswith("self_attn")
        assert padded.sampled_rows == single.sampled_rows == sum(lengths) * 4
        assert padded.bounds == pytest.approx(single.bounds, rel=1e-4)
        assert padded.entropy == pytest.approx(single.entropy, rel=1e-4)
        assert padded.uniform_entropy == pytest.approx(single.uniform_entropy, rel=1e-6)


@torch.no_grad()
def test_masks_that_differ_from_layer_to_layer():
    class Layer(nn.Module):
        def __init__(self, length):
            super().__init__()
            self.length = length

        def forward(self, x, shared):
            heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
            if self.length == "shared":
                # One tensor, written to between its uses.
                shared[:, 3:] = False
                mask = shared
            else:
                mask = None if self.length is None else torch.arange(TOKENS).expand(TOKENS, -1) < self.length
            return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).transpose(1, 2).flatten(2)

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer(length) for length in ("shared", 5, 7, None, None))

        def forward(self, x):
            shared = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
            F.scaled_dot_product_attention(*[x.unflatten(-1, (4, 4)).transpose(1, 2)] * 3, attn_mask=shared)
            for layer in self.layers:
                x = layer(x, shared)
            return x

    model, x = Layers(), torch.randn(BATCH, TOKENS, WIDTH)
    probe = Probed(model, x)
    with probe:
        model(x)
    allowed = [math.exp(one.uniform_entropy) for one in probe.attentions()]
    assert allowed == pytest.approx([TOKENS, 3, 5, 7, TOKENS, TOKENS])


@torch.no_grad()
def test_a_softmax_that_is_no_attention_is_ignored():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(WIDTH, 4)

        def forward(self, x):
            weights = self.gate(x).softmax(-1)
            F.softmax(torch.randn(2, 4, 7, 7), dim=-1)
            return x * weights.sum(-1, keepdim=True)

    model, x = nn.Sequential(Routed(), Routed()), torch.randn(BATCH, TOKENS, WIDTH)
    probe = Probed(model, x)
    with probe:
        model(x)
    assert probe.attentions() == ()


@torch.no_grad()
def test_a_softmax_beside_an_sdpa_call_is_ignored():
    class Both(nn.Module):
        def forward(self, x):
            heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
            (heads @ heads.transpose(-1, -2)).softmax(-1)
            return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)

    model, x = nn.Sequential(Both()), torch.randn(BATCH, TOKENS, WIDTH)
    probe = Probed(model, x)
    with probe:
        model(x)
    assert [(one.path, one.source) for one in probe.attentions()] == [("0", "sdpa")]


@torch.no_grad()
def test_all_query_rows_count_that_the_mask_does_not_fit():
    class Shortened(nn.Module):
        def forward(self, x):
            heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
            return F.scaled_dot_product_attention(heads[:, :, ::2], heads, heads)

    model, x = nn.Sequential(Shortened()), torch.randn(BATCH, TOKENS, WIDTH)
    probe = Probed(model, x)
    with probe:
        probe.batch(MASK)
        model(x)
    assert probe.attentions()[0].sampled_rows == BATCH * 4 * TOKENS // 2


@torch.no_grad()
def test_the_model_computes_what_it_computed_and_is_left_as_it_was():
    model, x = Model(), torch.randn(BATCH, TOKENS, WIDTH)
    expected = model(x)
    probe = Probed(model, x)
    with probe:
        assert torch.equal(model(x), expected)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_an_exception_in_the_middle():
    model, x = Model(), torch.randn(BATCH, TOKENS, WIDTH)
    probe = Probed(model, x)

    def run():
        with probe:
            model(x)
            model.layers[1].mlp(torch.randn(2, 3))

    with pytest.raises(RuntimeError, match="shapes"):
        run()
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert probe.sites()["layers.0.norm"].calls == 1
    # Again, after one forward pass that raised within the context.
    with probe:
        with pytest.raises(RuntimeError, match="shape"):
            model(x[..., :5])
        model(x)
    assert probe.sites()["layers.1:rms_norm"].calls == 2


def test_gradients_flow_as_before():
    model, x = Model(), torch.randn(BATCH, TOKENS, WIDTH)
    model(x).square().sum().backward()
    expected = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    probe = Probed(model, x)
    with probe:
        model(x).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert (gradient is None) == (parameter.grad is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("mask", [torch.ones(2, 3), torch.ones(3, dtype=torch.bool)])
def test_a_mask_is_boolean_with_two_axes(mask):
    probe = Probed(Model(), torch.randn(BATCH, TOKENS, WIDTH))
    with pytest.raises(InputError, match=r"boolean of shape \(B, T\)"):
        probe.batch(mask)
