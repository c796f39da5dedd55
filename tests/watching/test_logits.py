"""Attention logits that a watch counts, against all of them in float64 and against an inspection."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from normkit.measurement.attention import AttentionAccumulator, QueriesAndKeys, select
from normkit.measurement.tables import Tables
from normkit.watching.logits import HEAD_PEAKS, HEAD_SUMS, add_call, add_logits, head_tables

HEADS, LENGTH, DIM = 4, 6, 8


def numbers(call: QueriesAndKeys, tokens: Tensor | None = None) -> dict[str, Tensor]:
    tables = Tables(head_tables(1, HEADS), torch.device("cpu"))
    add_call(tables, 0, call, tokens)
    return read(tables)


def read(tables: Tables) -> dict[str, Tensor]:
    return {name: tables["heads"][0, :, place] for place, name in enumerate(HEAD_SUMS)} | {
        name: tables["head peaks"][0, :, place] for place, name in enumerate(HEAD_PEAKS)
    }


def call(**changes: Any) -> QueriesAndKeys:
    given = {
        "query": torch.randn(2, HEADS, LENGTH, DIM),
        "key": torch.randn(2, HEADS, LENGTH, DIM),
        "mask": None,
        "causal": False,
        "scale": DIM**-0.5,
    }
    return QueriesAndKeys(**{**given, **changes})


def truth(each: QueriesAndKeys, tokens: Tensor | None = None) -> dict[str, Tensor]:
    """From all logits; at up to eight rows all are sampled."""
    key = each.key.double().repeat_interleave(HEADS // each.key.shape[1], 1)
    logits = each.query.double() @ key.mT * each.scale
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    added = torch.zeros(logits.shape, dtype=torch.float64)
    if each.causal:
        allowed &= torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    if each.mask is not None and each.mask.dtype == torch.bool:
        allowed &= each.mask
    elif each.mask is not None:
        is_finite = each.mask > torch.finfo(each.mask.dtype).min
        allowed &= is_finite
        added += torch.where(is_finite, each.mask, 0.0).double()
    if tokens is not None:
        allowed &= tokens[:, None, :, None]
        if each.key.shape[2] == each.query.shape[2]:
            allowed &= tokens[:, None, None, :]
    share = (logits + added).masked_fill(~allowed, -math.inf).softmax(-1)
    entropy = torch.special.entr(share).sum(-1)
    known = allowed.any(-1)
    keys = allowed.sum(-1)
    above = logits.masked_fill(~allowed, -math.inf).amax(-1) - torch.where(allowed, logits, 0.0).sum(-1) / keys
    return {
        "contested": (keys > 1).sum((0, 2)),
        "spread": torch.where(keys > 1, above, 0.0).sum((0, 2)),
        "saturated": ((share.amax(-1) > 0.99) & (keys > 1)).sum((0, 2)),
        "rows": known.sum((0, 2)),
        "entropy": torch.where(known, entropy, 0.0).sum((0, 2)),
        "uniform": torch.where(known, allowed.sum(-1), 1).double().log().sum((0, 2)),
        "sampled": torch.where(allowed, logits, 0.0).abs().amax((0, 2, 3)),
    }


TOKENS = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
SOME = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.3
CASES = {
    "plain": ({}, None),
    "causal": ({"causal": True}, None),
    "scaled": ({"scale": -2.5}, None),
    "grouped": ({"key": torch.randn(2, 2, LENGTH, DIM)}, None),
    "padded": ({}, TOKENS),
    "boolean": ({"mask": SOME}, None),
    "of two axes": ({"mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()}, None),
    "additive": ({"mask": torch.where(SOME, torch.randn(2, 1, LENGTH, LENGTH), -math.inf)}, None),
    "float16 mask": ({"mask": torch.where(SOME, 0.0, torch.finfo(torch.float16).min).half()}, None),
    "float32 mask": ({"mask": torch.where(SOME, 0.0, torch.finfo(torch.float32).min)}, TOKENS),
    "biased": ({"mask": 30 * torch.randn(1, HEADS, LENGTH, LENGTH)}, None),
    "crossed": ({"key": torch.randn(2, HEADS, 11, DIM)}, TOKENS),
    "bfloat16": ({"query": torch.randn(2, HEADS, LENGTH, DIM).bfloat16()}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call_is_counted_exactly_and_the_bound_holds(name: str):
    changes, tokens = CASES[name]
    each = call(**changes)
    found, expected = numbers(each, tokens), truth(each, tokens)
    for quantity, values in expected.items():
        torch.testing.assert_close(found[quantity], values.double(), rtol=1e-5, atol=1e-5)
    assert (found["bound"] >= expected["sampled"] * (1 - 1e-6)).all()


def test_the_bound_is_that_of_an_inspection():
    each = call(causal=True)
    accumulator = AttentionAccumulator("", None, "sdpa", HEADS)
    accumulator.add_call(each, select(each, TOKENS))
    found, inspected = numbers(each, TOKENS), accumulator.result()
    assert found["bound"].tolist() == pytest.approx(list(inspected.bounds), rel=1e-6)
    assert float(found["sampled"].max()) == pytest.approx(inspected.sampled_max, rel=1e-6)
    assert float(found["entropy"].sum() / found["rows"].sum()) == pytest.approx(inspected.entropy, rel=1e-5)
    assert (found["spread"] / found["contested"]).tolist() == pytest.approx(list(inspected.spreads), rel=1e-5)
    assert (found["saturated"] / found["contested"]).tolist() == list(inspected.saturations)


def test_padding_that_is_not_a_number_stays_out():
    each = call()
    each.query[0, :, 4:], each.key[0, :, 4:] = math.nan, math.nan
    found, clean = numbers(each, TOKENS), truth(call(query=each.query.nan_to_num(), key=each.key.nan_to_num()), TOKENS)
    torch.testing.assert_close(found["sampled"], clean["sampled"], rtol=1e-5, atol=1e-5)
    assert found["bound"].isfinite().all()


def test_a_key_that_is_not_a_number_bounds_nothing():
    each = call()
    each.key[0, 1, 2, 3] = math.nan
    found = numbers(each)
    assert found["bound"].isinf().tolist() == [False, True, False, False]


def test_eight_rows_are_sampled_evenly_with_the_first_and_the_last():
    query = torch.zeros(1, HEADS, 1001, DIM)
    query[:, :, [0, 1000]] = 3.0
    found = numbers(call(query=query, key=torch.ones(1, HEADS, 5, DIM)))
    assert found["rows"].tolist() == [8] * HEADS
    query[:, :, [0, 1000]] = 0.0
    query[:, :, 1:142] = 9.0
    assert not numbers(call(query=query, key=torch.ones(1, HEADS, 5, DIM)))["sampled"].any()


def test_a_softmax_is_counted_as_its_call():
    each = call(causal=True)
    logits = (each.query @ each.key.mT * each.scale).masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -math.inf)
    tables = Tables(head_tables(1, HEADS), torch.device("cpu"))
    add_logits(tables, 0, logits, TOKENS)
    found = read(tables)
    share = logits.double().softmax(-1)
    entropy = torch.where(TOKENS[:, None], torch.special.entr(share).sum(-1), 0.0).sum((0, 2))
    torch.testing.assert_close(found["entropy"], entropy, rtol=1e-5, atol=1e-6)
    assert torch.equal(found["bound"], found["sampled"])
    visible = torch.where(logits.isfinite() & TOKENS[:, None, :, None], logits, 0.0)
    assert found["bound"].tolist() == pytest.approx(visible.abs().amax((0, 2, 3)).tolist())
