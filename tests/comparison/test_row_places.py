"""Which calls of two recordings stand for each other, and in which order their rows are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normkit.comparison.recording import RecordedNorm, Recording
from normkit.comparison.row_places import block_between, calls_of, first_tokens, paired


def rows(seed: int, count: int = 12, features: int = 32) -> Tensor:
    return torch.randn(count, features, generator=torch.Generator().manual_seed(seed))


def norm(seed: int, *, gain: int | None = None, count: int = 12) -> RecordedNorm:
    weight = None if gain is None else 1 + 0.3 * rows(gain, 1)[0]
    return RecordedNorm(input=rows(seed, count), output=rows(seed + 1, count), weight=weight)


def test_norms_are_paired_by_path_in_the_order_of_the_reference() -> None:
    port = Recording(norms={"b": norm(1), "a": norm(2)}, order=("b", "a"))
    reference = Recording(norms={"a": norm(3), "b": norm(4)}, order=("a", "b"))
    assert [(each.path, each.matched_by) for each in paired(port, reference).pairs] == [("a", "path"), ("b", "path")]


def test_norms_with_other_names_are_paired_by_what_they_hold() -> None:
    reference = Recording(norms={name: norm(1, gain=place) for place, name in enumerate("abc")})
    # The first is missing, gains hold the 1 and are rounded; one more norm stands at the end.
    weights = [(reference.norms[name].weight + 1).bfloat16() for name in "bc"]
    port = Recording(
        norms={"x": replace(norm(2), weight=weights[0]), "y": replace(norm(2), weight=weights[1]), "z": norm(2, gain=9)}
    )
    found = paired(port, reference)
    assert [(each.path, each.reference) for each in found.pairs] == [("x", "b"), ("y", "c")]
    assert (found.only_port, found.only_reference) == (("z",), ("a",))


def test_norms_whose_gains_are_exchanged_are_paired_in_turn() -> None:
    reference = Recording(norms={"a": norm(1, gain=1), "b": norm(1, gain=2)})
    port = Recording(norms={"x": norm(2, gain=2), "y": norm(2, gain=1)})
    assert [(each.path, each.reference) for each in paired(port, reference).pairs] == [("x", "a"), ("y", "b")]


def test_a_norm_that_is_called_twice_is_two() -> None:
    shared = replace(norm(1, count=24), calls=(4, 4, 8, 8))
    found = calls_of(Recording(norms={"a": norm(2), "s": shared}, order=("s", "a", "s")))
    assert [*found] == ["s", "a", "s#2"]
    assert torch.equal(found["s"].input, torch.cat([shared.input[:4], shared.input[8:16]]))
    assert torch.equal(found["s#2"].input, torch.cat([shared.input[4:8], shared.input[16:]]))


@pytest.mark.parametrize("lengths", [(4,), (2, 2), (1, 3)])
def test_heads_may_stand_before_tokens(lengths: tuple[int, ...]) -> None:
    tokens = tuple((1,) * length for length in lengths)
    given = norm(1)
    heads_first = [
        part.view(-1, 3, 32).transpose(0, 1).reshape(-1, 32) for part in given.input.split([3 * n for n in lengths])
    ]
    order = [
        part.view(-1, 3, 32).transpose(0, 1).reshape(-1, 32) for part in given.output.split([3 * n for n in lengths])
    ]
    other = replace(given, input=torch.cat(heads_first), output=torch.cat(order))
    reference = Recording(norms={"a": given}, tokens=tokens)
    (place,) = paired(Recording(norms={"a": other}, tokens=tokens), reference).pairs
    assert torch.equal(place.port_rows[0], given.input)
    assert torch.equal(place.port_rows[1], given.output)


@pytest.mark.parametrize(
    ("since", "path", "block"),
    [
        ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "attention"),
        ("model.layers.0.post_attention_layernorm", "model.layers.1.input_layernorm", "MLP"),
        ("model.layers.0.post_attention_layernorm", "model.layers.0.pre_feedforward_layernorm", "residual sum"),
        ("model.layers.0.pre_feedforward_layernorm", "model.layers.0.post_feedforward_layernorm", "MLP"),
        ("model.layers.0.self_attn.k_norm", "model.layers.0.post_attention_layernorm", "attention"),
        ("h.0.ln_1", "h.0.ln_2", "attention"),
        ("h.0.ln_2", "ln_f", "MLP"),
        ("stack.0.a", "stack.0.b", ""),
    ],
)
def test_the_block_between_two_norms_follows_from_their_names(since: str, path: str, block: str) -> None:
    assert block_between(since, path) == block


def test_the_rows_of_first_tokens() -> None:
    assert first_tokens(((1, 2), (3,)), 6).tolist() == [True, True, False, False, True, True]
    assert not first_tokens((), 6).any()
    assert not first_tokens(((1, 2),), 5).any()
