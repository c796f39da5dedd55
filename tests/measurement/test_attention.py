from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from normkit.measurement.attention import (
    add_call,
    add_logits,
    attention_at,
    head_tables,
    queries_and_keys,
    select,
    softmax_logits,
)
from normkit.measurement.row_counters import Tables

B, H, T, D = 2, 4, 12, 8
# The accumulator works in float32: a hundred roundings over sums of at most 40 terms.
CLOSE = {"rel": 1e-5}


def called(*args, tokens=None, **kwargs):
    """One scaled_dot_product_attention call, measured."""
    return counted((args, kwargs), tokens=tokens)


def counted(*calls, tokens=None):
    tables = empty()
    for args, kwargs in calls:
        call = queries_and_keys(args, kwargs)
        add_call(tables, 0, call, select(call, tokens))
    return read(tables, head_dim=D)


def softmaxed(logits, tokens=None):
    tables = empty()
    add_logits(tables, 0, logits, tokens)
    return read(tables, source="softmax")


def empty():
    return Tables(head_tables(1, H), torch.device("cpu"))


def read(tables, source="sdpa", head_dim=0):
    return attention_at(tables.read(), 0, path="layer.attention", block=3, source=source, heads=H, head_dim=head_dim)


def exact(query, key, *, allowed, valid=None, scale=None, bias=None):
    """The same by its definition, over every valid row, in float64."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1).double()
    query = query.double()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    dots = query @ key.transpose(-1, -2) * scale
    allowed = allowed.expand_as(dots)
    rows = allowed.any(-1) if valid is None else allowed.any(-1) & valid[:, None]
    logits = (dots if bias is None else dots + bias).masked_fill(~allowed, -math.inf)
    probability = logits.softmax(-1)
    entropy = -torch.where(probability > 0, probability * probability.log(), 0.0).sum(-1)
    used = allowed & rows[..., None]
    counts = allowed.sum(-1)
    contested = rows & (counts > 1)
    above = dots.masked_fill(~allowed, -math.inf).amax(-1) - torch.where(allowed, dots, 0.0).sum(-1) / counts
    lengths = torch.where(rows, query.norm(dim=-1), 0.0).amax(-1)
    widths = torch.where(used.any(2), key.norm(dim=-1), 0.0).amax(-1)
    return {
        "bounds": (lengths * widths * scale).amax(0).tolist(),
        "peak": float(dots[used].abs().max()),
        "rows": int(rows.sum()),
        "entropy": float(entropy[rows].mean()),
        "entropy_min": min(float(entropy[:, head][rows[:, head]].mean()) for head in range(query.shape[1])),
        "spreads": [float(above[:, head][contested[:, head]].mean()) for head in range(query.shape[1])],
        "saturations": [
            float((probability.amax(-1) > 0.99)[:, head][contested[:, head]].double().mean())
            for head in range(query.shape[1])
        ],
        "uniform": float(allowed.sum(-1)[rows].double().log().mean()),
    }


def assert_agree(found, expected):
    assert found.bounds == pytest.approx(expected["bounds"], **CLOSE)
    assert found.bound == max(found.bounds)
    assert found.sampled_max == pytest.approx(expected["peak"], **CLOSE)
    assert found.sampled_max <= found.bound * (1 + 1e-6)
    assert found.sampled_rows == expected["rows"]
    assert found.entropy == pytest.approx(expected["entropy"], **CLOSE)
    assert found.entropy_min == pytest.approx(expected["entropy_min"], **CLOSE)
    assert found.uniform_entropy == pytest.approx(expected["uniform"], **CLOSE)
    assert found.spreads == pytest.approx(expected["spreads"], **CLOSE)
    assert found.saturations == pytest.approx(expected["saturations"])


def everything(queries=T, keys=T):
    return torch.ones(1, 1, queries, keys, dtype=torch.bool)


def causal(queries=T, keys=T):
    return torch.ones(1, 1, queries, keys, dtype=torch.bool).tril()


def tensors(keys=T, key_heads=H):
    return torch.randn(B, H, T, D) * 2, torch.randn(B, key_heads, keys, D), torch.randn(B, key_heads, keys, D)


def test_what_a_call_is():
    found = called(*tensors())
    assert (found.path, found.block, found.source, found.heads, found.head_dim) == ("layer.attention", 3, "sdpa", H, D)


def test_without_a_mask():
    query, key, value = tensors()
    assert_agree(called(query, key, value), exact(query, key, allowed=everything()))


def test_causality():
    query, key, value = tensors()
    assert_agree(called(query, key, value, is_causal=True), exact(query, key, allowed=causal()))


def test_more_queries_than_keys():
    query, key, value = tensors(keys=5)
    assert_agree(called(query, key, value, is_causal=True), exact(query, key, allowed=causal(T, 5)))


def test_positional_arguments_and_a_scale():
    query, key, value = tensors()
    expected = exact(query, key, allowed=causal(), scale=0.7)
    assert_agree(called(query, key, value, None, 0.0, True, scale=0.7), expected)
    turned = exact(-query, key, allowed=everything(), scale=2.5)
    assert_agree(called(query, key, value, scale=-2.5), turned)


def test_a_boolean_mask_for_each_head():
    query, key, value = tensors()
    mask = torch.rand(B, H, T, T) < 0.4
    assert_agree(called(query, key, value, attn_mask=mask), exact(query, key, allowed=mask))


def test_masked_keys_and_queries_never_enter():
    query, key, value = tensors()
    tokens = torch.arange(T)[None] < torch.tensor([[7], [T]])
    mask = tokens[:, None, None] & causal()
    expected = exact(query, key, allowed=mask, valid=tokens)
    # Poison in the padding.
    query[0, :, 7:], key[0, :, 7:] = math.nan, 1e9
    assert_agree(called(query, key, value, attn_mask=mask, tokens=tokens), expected)


def test_left_padding_leaves_rows_without_a_key():
    query, key, value = tensors()
    tokens = torch.arange(T)[None] >= torch.tensor([[5], [0]])
    mask = tokens[:, None, None] & causal()
    expected = exact(query, key, allowed=mask, valid=tokens)
    # Without the token mask: rows before the first token have no key, and say nothing.
    query[0, :, :5] *= 1e6
    assert_agree(called(query, key, value, attn_mask=mask), expected)


def test_right_padding_needs_no_mask_where_attention_is_causal():
    query, key, value = tensors()
    tokens = torch.arange(T)[None] < torch.tensor([[7], [T]])
    expected = exact(query, key, allowed=causal(), valid=tokens)
    query[0, :, 7:], key[0, :, 7:] = math.nan, 1e9
    assert_agree(called(query, key, value, is_causal=True, tokens=tokens), expected)


@pytest.mark.parametrize("forbidden", [-math.inf, torch.finfo(torch.float32).min, -1e9])
@pytest.mark.parametrize("shape", [(B, 1, T, T), (T, T), (B, 1, 1, T)])
def test_an_additive_mask(forbidden, shape):
    query, key, value = tensors()
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    additive = torch.zeros(shape).masked_fill(~mask, forbidden)
    assert_agree(called(query, key, value, attn_mask=additive), exact(query, key, allowed=mask))


def test_a_bias_counts_for_the_entropy_and_not_for_the_magnitudes():
    query, key, value = tensors()
    bias = -1000.0 - 0.3 * (torch.arange(T)[:, None] - torch.arange(T)).abs()
    found = called(query, key, value, attn_mask=bias.masked_fill(~causal()[0, 0], -math.inf))
    expected = exact(query, key, allowed=causal(), bias=bias)
    # float32 holds logits near -1000 to 6e-5.
    assert found.entropy == pytest.approx(expected["entropy"], rel=1e-3)
    assert found.sampled_max == pytest.approx(expected["peak"], **CLOSE)
    assert found.sampled_max < 100


@pytest.mark.parametrize("key_heads", [1, 2])
def test_keys_with_fewer_heads(key_heads):
    query, key, value = tensors(key_heads=key_heads)
    found = called(query, key, value, is_causal=True, enable_gqa=True)
    assert_agree(found, exact(query, key, allowed=causal()))


def test_half_precision():
    query, key, value = (tensor.bfloat16() for tensor in tensors())
    assert_agree(called(query, key, value), exact(query, key, allowed=everything()))


def test_sixteen_rows_are_spread_over_the_valid_ones():
    long = 61
    query, key, value = torch.randn(3, B, H, long, D)
    tokens = torch.arange(long)[None] < torch.tensor([[31], [5]])
    found = called(query, key, value, tokens=tokens)
    # 31 rows: every second of them; 5 rows: all of them.
    chosen = torch.zeros(B, long, dtype=torch.bool)
    chosen[0, 0:31:2] = True
    chosen[1, :5] = True
    expected = exact(query, key, allowed=everything(long, long), valid=chosen)
    assert found.sampled_rows == (16 + 5) * H
    assert found.entropy == pytest.approx(expected["entropy"], **CLOSE)
    assert found.sampled_max == pytest.approx(expected["peak"], **CLOSE)
    bounds = exact(query, key, allowed=everything(long, long), valid=tokens)["bounds"]
    assert found.bounds == pytest.approx(bounds, **CLOSE)


def test_calls_add_up():
    parts = [tensors() for _ in range(3)]
    query, key = (torch.cat(tensors) for tensors in list(zip(*parts, strict=True))[:2])
    assert_agree(counted(*((part, {}) for part in parts)), exact(query, key, allowed=everything()))


def test_what_is_not_finite_bounds_nothing():
    query, key, value = tensors()
    query[0, 1, 3] = math.nan
    found = called(query, key, value)
    assert math.isinf(found.bounds[1])
    assert math.isfinite(found.bounds[0])
    assert math.isinf(found.sampled_max)
    # The broken row has no entropy; the others keep theirs.
    assert found.sampled_rows == B * H * T - 1
    assert math.isfinite(found.entropy)
    query, key, value = tensors()
    key[0, 1, 2, 3] = math.nan
    assert [math.isinf(bound) for bound in called(query, key, value).bounds] == [False, True, False, False]


def test_attention_that_never_saw_a_row():
    found = read(empty())
    assert (found.sampled_rows, found.bound, found.sampled_max) == (0, 0.0, 0.0)
    assert math.isnan(found.entropy)


def test_heads_without_a_head_axis_are_left_alone():
    assert queries_and_keys((torch.randn(B, T, D), torch.randn(B, T, D), torch.randn(B, T, D)), {}) is None


@pytest.mark.parametrize("forbidden", [-math.inf, torch.finfo(torch.float32).min])
def test_the_logits_of_a_softmax(forbidden):
    query, key, value = tensors()
    tokens = torch.arange(T)[None] < torch.tensor([[7], [T]])
    mask = tokens[:, None, None] & causal()
    logits = query @ key.transpose(-1, -2) * D**-0.5
    found = softmaxed(logits + torch.zeros(B, 1, T, T).masked_fill(~mask, forbidden), tokens)
    expected = exact(query, key, allowed=mask, valid=tokens)
    rows = called(query, key, value, attn_mask=mask, tokens=tokens)
    assert found.source == "softmax"
    assert found.head_dim == 0
    assert found.bound == found.sampled_max == pytest.approx(expected["peak"], **CLOSE)
    assert found.sampled_rows == rows.sampled_rows
    assert found.entropy == pytest.approx(rows.entropy, **CLOSE)
    assert found.entropy_min == pytest.approx(rows.entropy_min, **CLOSE)
    assert found.uniform_entropy == pytest.approx(rows.uniform_entropy, **CLOSE)


def test_softmax_logits_that_are_not_a_number():
    logits = torch.randn(B, H, T, T)
    logits[0, 2, 1, 1] = math.nan
    found = softmaxed(logits)
    assert [math.isinf(bound) for bound in found.bounds] == [False, False, True, False]
    assert found.sampled_rows == B * H * T - 1


LOGITS = torch.randn(B, H, T, 20)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((LOGITS, -1), {}, True),
        ((LOGITS,), {"dim": 3}, True),
        ((), {"input": LOGITS, "dim": -1}, True),
        ((LOGITS, 1), {}, False),
        ((LOGITS[0], -1), {}, False),
        ((LOGITS.flatten(0, 2), -1), {}, False),
        ((LOGITS.long(), -1), {}, False),
    ],
)
def test_which_softmax_is_attention(args, kwargs, expected):
    assert (softmax_logits(args, kwargs) is not None) is expected


def test_the_sampled_entropy_is_the_entropy_of_what_torch_computes():
    query, key, _ = tensors()
    # Attention over one-hot values returns the probabilities themselves.
    probability = F.scaled_dot_product_attention(query, key, torch.eye(T).expand(B, H, T, T), is_causal=True)
    entropy = -torch.where(probability > 0, probability * probability.log(), 0.0).sum(-1)
    assert called(query, key, key, is_causal=True).entropy == pytest.approx(float(entropy.mean()), **CLOSE)
