"""Explanations of rows that differ: each is found where it was planted, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normkit import specs
from normkit.comparison.effects import Formula
from normkit.comparison.norm_causes import applied, causes_at
from normkit.comparison.own_rounding import Limit
from normkit.comparison.recording import RecordedNorm
from normkit.comparison.row_causes import (
    RowCause,
    cause_of_head,
    causes_before,
    causes_of_outputs,
    order_of,
    rotation_of,
    together,
)
from normkit.comparison.row_places import Place

SPEC = specs.TORCH_LAYER_NORM
LIMIT = Limit(median=1e-5, worst=1e-4)


def rows(seed: int, count: int = 64, features: int = 32) -> Tensor:
    return torch.randn(count, features, generator=torch.Generator().manual_seed(seed))


FORMULA = Formula(spec=SPEC, weight=1 + 0.3 * rows(8, 1)[0], bias=0.1 * rows(9, 1)[0])
X = 0.1 * (rows(0) + 0.5)


def causes(y: Tensor) -> list[RowCause]:
    expected = applied(FORMULA, X).float()
    place = Place(path="a", reference="A", matched_by="order", port_rows=(X, y.float()), reference_rows=(X, expected))
    return [*together(causes_at(place, {"A": FORMULA}, [place], LIMIT))]


def changed(**fields: object) -> Tensor:
    return applied(Formula(spec=SPEC.replace(**fields), weight=FORMULA.weight, bias=FORMULA.bias), X)


@pytest.mark.parametrize(
    ("y", "kind", "said"),
    [
        (X, "not applied", "a is not applied"),
        (changed(eps=1e-3), "formula", "eps 0.001 instead of 1e-05"),
        (changed(eps=3.3e-4), "formula", "eps 0.00033 instead of 1e-05"),
        (changed(weight_offset=1.0), "formula", "1 + weight instead of weight"),
        (changed(centre_numerator=False, centre_statistics=False), "formula", "centring not subtracted"),
        (changed(correction=1), "formula", "divisor divided by n - 1"),
        (applied(FORMULA, applied(FORMULA, X)), "applied twice", "a is applied twice"),
        (rows(5), "unknown", "do not follow the reference's formula"),
    ],
)
def test_what_a_port_does_at_a_norm(y: Tensor, kind: str, said: str) -> None:
    (cause,) = causes(y)
    assert (cause.kind, cause.paths) == (kind, ("a",))
    assert said in cause.words


def norm(x: Tensor, y: Tensor) -> RecordedNorm:
    return RecordedNorm(input=x, output=y)


OTHERS = {"P": norm(rows(1), rows(2)), "A": norm(rows(3), rows(4)), "F": norm(rows(6), rows(7))}


@pytest.mark.parametrize(
    ("x", "kind", "said"),
    [
        (rows(3) / 32**0.5, "scale", "0.1768 times what enters it in the reference: a factor sqrt(32) is missing"),
        (rows(3) * 3, "scale", "3 times"),
        (rows(2), "wiring", "what enters a in the port is what leaves P in the reference"),
        (
            rows(3) - rows(1) + rows(2),
            "wiring",
            "connection around P adds what the norm gives, not what enters it, as what enters a shows",
        ),
        (
            rows(3) - rows(1),
            "wiring",
            "what enters a lacks what enters P, which the reference's sum has: a residual connection is m",
        ),
        (rows(3) + rows(2), "wiring", "sum with what leaves P once more"),
    ],
)
def test_what_arrives_in_place_of_the_reference_s_rows(x: Tensor, kind: str, said: str) -> None:
    place = Place(path="a", reference="A", matched_by="order", port_rows=(x, x), reference_rows=(rows(3), rows(4)))
    starts = torch.zeros(64, dtype=torch.bool)
    (cause,) = causes_before(place, {"a": norm(x, rows(50))}, OTHERS, LIMIT, starts, may_be_attention=True)
    assert cause.kind == kind
    assert said in cause.words


@pytest.mark.parametrize("noise", [0.0, 1e-8, 1e-2])
@pytest.mark.parametrize("what", ["features", "heads"])
def test_another_order_of_features_or_heads_is_told(what: str, noise: float) -> None:
    x0 = rows(3)
    x = x0.flip(-1) if what == "features" else x0.unflatten(0, (16, 4)).flip(1).flatten(0, 1)
    x = x + noise * rows(5)
    place = Place(path="a", reference="A", matched_by="order", port_rows=(x, x), reference_rows=(x0, x0))
    cause = order_of(place, LIMIT, 16)
    assert (cause is None) is (noise > 1e-7)
    assert cause is None or cause.words == f"what enters a is the reference's with its {what} in another order"


def rotated(x: Tensor, how: str) -> Tensor:
    """The rows of heads after a rotary embedding, 16 tokens of 4 heads each."""
    halves, features = x.shape[1] // 2, torch.arange(x.shape[1])
    order = features if how == "half a row apart" else torch.cat([features[::2], features[1::2]])
    angles = torch.arange(len(x)).div(4, rounding_mode="floor")[:, None] * 100.0 ** -torch.linspace(0, 1, halves)
    first, second = x[:, order].split(halves, 1)
    turned = torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], 1)
    return turned[:, order.argsort()]


@pytest.mark.parametrize("how", ["half a row apart", "of neighbouring features", "any"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_heads_that_are_turned_alone_name_a_rotation_before_the_norm(how: str, dtype: torch.dtype) -> None:
    x0 = rows(3)
    x = x0 @ torch.linalg.qr(rows(5)[:32])[0] if how == "any" else rotated(x0, how)
    place = Place(
        path="h.q_norm", reference="A", matched_by="path", port_rows=(x.to(dtype), x), reference_rows=(x0.to(dtype), x0)
    )
    limit = LIMIT if dtype == torch.float32 else Limit(median=2**-7, worst=2**-5)
    found = rotation_of(place, limit)
    assert found is not None
    assert (found.kind, found.paths) == ("rotation", ("h.q_norm",))
    pair = "" if how == "any" else f", as a whole and in each pair {'of features ' if 'half' in how else ''}{how}"
    said = f"each row that enters h.q_norm has the reference's length{pair}, and another direction: the rotary"
    assert found.words.startswith(said)
    # Unrelated rows, even of nearly one length, and rows of no head are none.
    wide = Limit(median=0.5, worst=2.0)
    assert rotation_of(replace(place, port_rows=(rows(8), x)), wide) is None
    assert rotation_of(replace(place, path="a"), limit) is None


def test_the_first_token_may_agree_alone() -> None:
    x, starts = rows(5).clone(), torch.arange(64) % 16 == 0
    x[starts] = rows(3)[starts]
    place = Place(path="a", reference="A", matched_by="order", port_rows=(x, x), reference_rows=(rows(3), rows(4)))

    def found(*, may_be_attention: bool) -> list[RowCause]:
        given = {"a": norm(x, rows(50))}
        return [*causes_before(place, given, OTHERS, LIMIT, starts, may_be_attention=may_be_attention)]

    assert [each.kind for each in found(may_be_attention=True)] == ["first token"]
    assert found(may_be_attention=False) == []


@pytest.mark.parametrize(("noise", "is_told"), [(0.1, False), (0.01, True)])
def test_a_factor_is_told_where_it_explains_the_difference(noise: float, is_told: bool) -> None:
    """A wide limit, as 16 bits have in deep layers, holds what is left of any difference near it."""
    x0 = rows(3)
    x = 1.02 * x0 + noise * x0.norm() / rows(5).norm() * rows(5)
    place = Place(path="a", reference="A", matched_by="order", port_rows=(x, x), reference_rows=(x0, rows(4)))
    wide, starts = Limit(median=0.2, worst=0.4), torch.zeros(64, dtype=torch.bool)
    found = [*causes_before(place, {"a": norm(x, rows(50))}, {}, wide, starts, may_be_attention=True)]
    assert [each.kind for each in found] == (["scale"] if is_told else [])


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (rows(7), None),
        (rows(6), "the final norm is not applied: the head takes what enters F in the reference"),
        (rows(4), "the port's head takes what leaves A in the reference"),
        (rows(77), None),
    ],
)
def test_what_the_head_takes(head: Tensor, said: str | None) -> None:
    found = [each.words for each in cause_of_head(head, {"a": norm(rows(90), rows(91))}, OTHERS, LIMIT)]
    assert found == ([] if said is None else [said])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda y: 2.5 * y, "the port's outputs are 2.5 times the reference's"),
        (lambda y: 30 * torch.tanh(y / 30), "the port's outputs are the reference's with a softcap, 30 * tanh(x / 30)"),
        (lambda y: y, None),
        (lambda y: y + 0.1 * rows(11), None),
    ],
)
def test_outputs_that_are_a_function_of_the_reference_s(given, said: str | None) -> None:
    expected = 10 * rows(10)
    found = [each.words for each in causes_of_outputs(given(expected), expected, LIMIT)]
    assert found == ([] if said is None else [said])
    if said is not None and "softcap" in said:
        (lacking,) = causes_of_outputs(expected, given(expected), LIMIT)
        assert lacking.words == "the port's outputs lack a softcap, 30 * tanh(x / 30)"


def test_causes_that_say_the_same_are_one() -> None:
    alike = [RowCause(kind="formula", paths=(path,), words="at {} eps is lost") for path in "abcde"]
    (found,) = together([*alike, alike[0]])
    assert found.paths == tuple("abcde")
    assert found.words == "at 5 norms (a, b, c and 2 more) eps is lost"
