from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from scipy.spatial import ConvexHull
from torch import nn

from normkit.identification.tracing import trace
from normkit.inspection import first_text
from normkit.inspection.first_text import key_selections
from normkit.measurement.layout import find_blocks

WIDTH, HEADS, TOKENS = 6, 3, 40


class Attention(nn.Module):
    """Three heads of two features: little room for forty keys."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, mask=None, memory=None):
        read = x if memory is None else memory
        query, key, value = (
            layer(given).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer, given in ((self.query, x), (self.key, read), (self.value, read))
        )
        mask = None if mask is None else mask[:, None, None]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return attended.transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x, mask=None):
        return x + self.attention(self.norm(x), mask)


class Model(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = layer(x, mask)
        return x


@torch.no_grad()
def judged(model, *args, mask=None, progress=None, given=None, **kwargs):
    def run():
        return model(*args, **kwargs)

    called = trace(model, run)
    report = progress or (lambda _done, _total: None)
    given = next(x for x in (given, *args, *kwargs.values()) if isinstance(x, torch.Tensor))
    batch = {"x": given} if mask is None else {"x": given, "attention_mask": mask[None]}
    with key_selections(model, called, find_blocks(model, called), batch, report) as found:
        run()
    return tuple(found)


@torch.no_grad()
def seen(model, x, *args):
    """What enters each attention module, and its keys."""
    found = []

    def keep(module, given):
        found.append((given[0][0], module.key(given[0])[0].unflatten(-1, (HEADS, -1)).transpose(0, 1)))

    handles = [layer.attention.register_forward_pre_hook(keep) for layer in model.layers]
    model(x, *args)
    for handle in handles:
        handle.remove()
    return found


def on_hull(points, places):
    """The share of some points that are corners of the convex hull, from Qhull."""
    corners = set(ConvexHull(points.double().numpy()).vertices.tolist())
    return sum(place in corners for place in places) / len(places)


# 0 to 39 in 15 steps of 2.6, rounded.
PLACES = [0, 3, 5, 8, 10, 13, 16, 18, 21, 23, 26, 29, 31, 34, 36, 39]


@pytest.mark.slow
def test_heads_against_their_convex_hulls():
    model, x = Model(), torch.randn(1, TOKENS, WIDTH)
    found = judged(model, x)
    assert [one.path for one in found] == ["layers.0.attention", "layers.1.attention"]
    assert [one.block for one in found] == [0, 1]
    for one, (entered, keys) in zip(found, seen(model, x), strict=True):
        assert (one.keys, one.sampled, one.key_heads) == (TOKENS, 16, HEADS)
        assert one.heads == tuple((head, on_hull(keys[head], PLACES)) for head in range(HEADS))
        # Two features hide most of forty keys; on the norm's ellipsoid none is hidden.
        assert 0 < one.after < 0.6
        assert one.before == 1.0
        assert one.after == pytest.approx(sum(share for _, share in one.heads) / HEADS)
        # The rows lie in a hyperplane: five of their six features tell their hull.
        assert on_hull(entered[:, :5], PLACES) == 1.0


@pytest.mark.slow
def test_rows_that_no_norm_has_seen_may_be_hidden_before():
    class Bare(Layer):
        def forward(self, x, mask=None):
            return x + self.attention(x, mask)

    model = nn.Sequential(Bare(), Bare())
    x = torch.randn(1, TOKENS, WIDTH) * torch.tensor([1.0, 1.0, 0.01, 0.0, 0.0, 0.0])
    found = judged(model, x)
    assert found[0].before == on_hull(x[0, :, :3], PLACES)
    assert found[0].before < 1.0


@pytest.mark.slow
def test_rows_of_more_features_than_there_are_rows():
    class Bare(nn.Module):
        def forward(self, x):
            heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)

    # In float32, rounding would lift the rows out of their plane.
    flat = torch.randn(TOKENS, 2, dtype=torch.float64)
    x = flat @ torch.linalg.qr(torch.randn(100, 2, dtype=torch.float64)).Q.T
    assert judged(nn.Sequential(Bare()), x[None])[0].before == on_hull(flat, PLACES) < 1.0


@pytest.mark.slow
def test_padding_is_no_key():
    model, x = Model(1), torch.randn(1, TOKENS, WIDTH)
    mask = torch.ones(1, TOKENS + 9, dtype=torch.bool)
    mask[0, :4], mask[0, -5:] = False, False
    padded = torch.cat([torch.full((1, 4, WIDTH), 50.0), x, torch.randn(1, 5, WIDTH) * 90], 1)
    alone, with_padding = judged(model, x), judged(model, padded, mask, mask=mask[0])
    assert with_padding == alone


@pytest.mark.slow
def test_keys_of_another_length_than_the_mask_are_not_judged():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention()

        def forward(self, x):
            return self.attention(x, memory=x[:, ::2])

    model, x = Pooled(), torch.randn(1, TOKENS, WIDTH)
    assert judged(model, x, mask=torch.arange(TOKENS) < 30) == ()
    assert judged(model, x)[0].keys == TOKENS // 2


@pytest.mark.slow
def test_the_first_256_keys_of_a_long_text():
    model, x = Model(1), torch.randn(1, 300, WIDTH)
    found = judged(model, x)
    assert found[0].keys == 256
    # One block alone reads the same of the first 256 tokens: the rest only changes what it writes.
    assert found == judged(model, x[:, :256])


def test_a_short_text_has_all_its_keys_tried():
    found = judged(Model(1), torch.randn(1, 3, WIDTH))
    assert (found[0].keys, found[0].sampled, found[0].after) == (3, 3, 1.0)
    single = judged(Model(1), torch.randn(1, 1, WIDTH))
    assert (single[0].keys, single[0].sampled, single[0].after, single[0].before) == (1, 1, 1.0, 1.0)


def test_a_key_that_recurs_counts_once():
    model, x = Model(1), torch.randn(1, 8, WIDTH)
    model.layers[0].attention.key.weight.data[2:] = 0
    repeated = judged(model, x.repeat(1, 2, 1))
    assert repeated[0].before == 1.0
    # Heads of one key alone.
    assert dict(repeated[0].heads)[1] == 1.0
    assert repeated[0].heads[0] == judged(model, x)[0].heads[0]


def test_keys_that_are_not_finite_are_left_out():
    model, x = Model(1), torch.randn(1, TOKENS, WIDTH)
    model.layers[0].attention.key.bias.data[2] = float("nan")
    found = judged(model, x)
    assert [head for head, _ in found[0].heads] == [0, 2]
    assert found[0].before == 1.0
    model.layers[0].attention.key.bias.data[:] = float("inf")
    assert judged(model, x)[0].heads == ()
    model.layers[0].norm.bias.data[:] = float("nan")
    assert judged(model, x)[0].before is None


@pytest.mark.slow
def test_where_keys_may_come_from_elsewhere_the_rows_before_are_unknown():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention()

        def forward(self, x, memory):
            return self.attention(x, memory=memory)

    x, memory = torch.randn(2, 1, TOKENS, WIDTH)
    found = judged(Decoder(), x, memory)
    assert found[0].before is None
    assert len(found[0].heads) == HEADS


@pytest.mark.slow
def test_a_large_model_has_some_heads_tried_spread_over_its_calls(monkeypatch):
    model, x = Model(5), torch.randn(1, TOKENS, WIDTH)
    whole = {one.path: dict(one.heads) for one in judged(model, x)}
    # Heads of 2 features and 40 keys: room for seven in all.
    monkeypatch.setattr(first_text, "_WORK", 7 * 2 * TOKENS)
    few = judged(model, x)
    assert [len(one.heads) for one in few] == [1, 1, 2, 1, 2]
    assert [head for head, _ in few[2].heads] == [0, 2]
    assert all(whole[one.path][head] == share for one in few for head, share in one.heads)
    # Room for less than one each: three calls of five are tried.
    monkeypatch.setattr(first_text, "_WORK", 3 * 2 * TOKENS)
    assert [one.block for one in judged(model, x)] == [1, 3, 4]


def test_a_call_that_shows_no_keys_is_passed_over():
    class Eager(nn.Module):
        def forward(self, x):
            return (x @ x.transpose(-1, -2)).softmax(-1) @ x

    assert judged(nn.Sequential(Eager()), torch.randn(1, TOKENS, WIDTH)) == ()

    class Flat(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    assert judged(nn.Sequential(Flat()), torch.randn(1, TOKENS, WIDTH)) == ()


def test_a_call_over_several_texts_is_passed_over():
    x = torch.randn(2, TOKENS, WIDTH)
    assert judged(Model(), x, given=x[:1]) == ()


@pytest.mark.slow
def test_one_text_of_several_is_judged_as_it_is_alone():
    model, x = Model(1).double(), torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    called = trace(model, lambda: model(x))
    # The first text has no token.
    batch = {"x": x, "attention_mask": torch.tensor([[False], [True], [True]]).expand(3, TOKENS)}
    with torch.no_grad(), key_selections(model, called, find_blocks(model, called), batch, lambda *_: None) as found:
        model(x)
    assert tuple(found) == judged(model, x[1:2]) != judged(model, x[:1])


def test_a_text_of_padding_alone_has_no_keys():
    mask = torch.zeros(1, TOKENS, dtype=torch.bool)
    assert judged(Model(), torch.randn(1, TOKENS, WIDTH), mask=mask[0]) == ()


def test_without_scipy_no_key_is_tried(monkeypatch):
    model, x = Model(), torch.randn(1, TOKENS, WIDTH)
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert judged(model, x) == ()


@pytest.mark.slow
def test_progress_counts_the_calls():
    told = []
    judged(Model(3), torch.randn(1, 3, WIDTH), progress=lambda done, total: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.slow
def test_the_model_is_left_as_it_was():
    model, x = Model(1), torch.randn(1, TOKENS, WIDTH)
    expected, state = model(x), torch.get_rng_state()
    assert judged(model, x) == judged(model, x)
    assert torch.equal(model(x), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_in_16_bits(dtype):
    model, x = Model(1).to(dtype), torch.randn(1, TOKENS, WIDTH, dtype=dtype)
    for one, (_, keys) in zip(judged(model, x), seen(model, x), strict=True):
        assert one.heads == tuple((head, on_hull(keys[head], PLACES)) for head in range(HEADS))
