"""What is said of a pair before anything is run: other names, missing norms, and a file in place of the reference."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planted_faults as faults
import screens
from normkit.comparison.comparing import compare
from normkit.comparison.differences import Comparison
from normkit.comparison.report import describe_comparison
from normkit.files import json_text
from normkit.identification.book import PassportBook, survey

pytestmark = pytest.mark.slow

MIDDLE = "transformer.h.1.ln_2"


def birth_of(found: Comparison) -> tuple[str, str | None]:
    assert found.rows.birth is not None
    return found.rows.birth.where, found.rows.birth.path


class Renamed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **batch: Tensor) -> Any:
        return self.inner(**batch)


def test_other_names_are_paired_in_order(port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]) -> None:
    port.get_submodule(MIDDLE).eps = 1e-2
    found = compare(Renamed(port), stock, batch)
    assert {pair.matched_by for pair in found.conventions.pairs} == {"order"}
    assert all(pair.entry.path == f"inner.{pair.reference.path}" for pair in found.conventions.pairs)
    assert birth_of(found) == ("at", f"inner.{MIDDLE}")
    assert [pair.reference.path for pair in found.conventions.changed] == [MIDDLE]


@pytest.mark.parametrize("renamed", [False, True])
def test_a_norm_left_out(port: nn.Module, stock: nn.Module, batch: dict[str, Tensor], renamed: bool) -> None:
    port.set_submodule(MIDDLE, nn.Identity())
    found = compare(Renamed(port) if renamed else port, stock, batch)
    assert [(each.path, each.owner, each.class_name) for each in found.conventions.unmatched] == [
        (MIDDLE, "reference", "LayerNorm")
    ]
    assert found.conventions.changed == ()
    assert birth_of(found) == ("before", f"{'inner.' if renamed else ''}transformer.h.2.ln_1")


def test_a_norm_too_many(port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]) -> None:
    found = compare(stock, faults.without_final_norm(port), batch)
    assert [(each.path, each.owner) for each in found.conventions.unmatched] == [("transformer.ln_f", "port")]
    assert found.differs


def test_what_the_reference_could_not_identify_is_named_with_the_reason(
    port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]
) -> None:
    book = survey(stock, lambda: stock(**batch))
    entries = tuple(entry for entry in book.entries if entry.path != MIDDLE)
    found = compare(port, PassportBook(model="r", entries=entries, left_out={MIDDLE: "gated"}), batch)
    assert [(each.path, each.owner, each.reason) for each in found.conventions.unmatched] == [(MIDDLE, "port", "gated")]


def test_what_neither_could_identify_is_not_compared() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.LayerNorm(8)).eval()
    model[0].running_mean.fill_(0.5)
    found = compare(model, model, {"input": torch.randn(2, 3, 8)})
    assert list(found.conventions.left_out) == ["0"]
    assert "BatchNorm1d" in found.conventions.left_out["0"][0]
    assert (
        found.conventions.left_out["0"][0]
        == found.conventions.left_out["0"][1]
        == found.to_json()["conventions"]["left_out"]["0"][1]
    )
    assert found.conventions.unmatched == ()


# Norms that round in other places.


class Rounding(nn.Module):
    """An RMS norm in float32 whose row is rounded before the gain, or after it."""

    def __init__(self, features: int, *, early: bool, narrow: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(features, generator=torch.Generator().manual_seed(1)))
        self.early, self.work = early, None if narrow else torch.float32

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.work or x.dtype)
        row = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * row.to(x.dtype) if self.early else (self.weight.to(row.dtype) * row).to(x.dtype)


class Rounded(nn.Module):
    def __init__(self, norm: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.norm, self.dtype = norm, dtype
        with torch.no_grad():
            self.embedding.weight.copy_(torch.randn(50, 64, generator=torch.Generator().manual_seed(2)))
        self.to(dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.norm(self.embedding(input_ids))


@pytest.mark.parametrize(
    ("port", "dtype", "given", "differs"),
    [
        ({"early": True}, torch.float16, torch.float32, False),
        ({"early": True}, torch.bfloat16, torch.bfloat16, True),
        ({"early": True}, torch.float32, torch.float32, False),
        ({"early": True, "narrow": True}, torch.float32, torch.float32, False),
        ({"early": True, "narrow": True}, torch.bfloat16, torch.bfloat16, True),
        ({"early": True, "narrow": True}, torch.float16, torch.float32, True),
    ],
)
def test_a_cast_that_the_dtypes_of_the_run_do_not_feel_is_a_note(
    port: dict[str, bool], dtype: torch.dtype, given: torch.dtype, differs: bool
) -> None:
    ids = torch.randint(50, (2, 64), generator=torch.Generator().manual_seed(0))
    found = compare(Rounded(Rounding(64, **port), dtype), Rounded(Rounding(64, early=False), given), {"input_ids": ids})
    [pair] = found.conventions.pairs
    assert found.differs is differs
    assert bool(pair.changes) is differs
    assert bool(pair.casts) is (dtype != given or dtype == torch.float32)
    text = screens.shown(describe_comparison(found), 400)
    assert ("the port is in float16, the reference in float32" in text) is (dtype == torch.float16)
    assert ("both run in float32, which does not feel it" in text) is (dtype == torch.float32)


# A file in place of the reference.


def read_back(model: nn.Module, batch: dict[str, Tensor]) -> PassportBook:
    book = survey(model, lambda: model(**batch), name="filed")
    return PassportBook.from_json(json.loads(json_text(book.to_json())))


def test_a_file_tells_what_a_model_tells_but_where_it_begins(
    port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]
) -> None:
    faults.wrong_eps(port)
    of_model, of_file = compare(port, stock, batch), compare(port, read_back(stock, batch), batch)
    assert (of_file.reference, of_file.differs) == ("filed", True)
    assert of_file.rows.not_run == "passports cannot be run"
    assert of_file.rows.birth is None
    assert len(of_file.conventions.changed) == 7
    for one, other in zip(of_file.conventions.changed, of_model.conventions.changed, strict=True):
        assert one.changes == other.changes
        assert one.with_parameters
        assert one.observed == other.observed


def test_other_parameters_than_a_file_s_are_noted_and_no_difference(
    port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]
) -> None:
    with torch.no_grad():
        port.get_submodule(MIDDLE).weight[7] *= 3
    found = compare(port, read_back(stock, batch), batch)
    assert not found.differs
    [pair] = [pair for pair in found.conventions.pairs if pair.parameters]
    assert (pair.entry.path, pair.parameters[0].difference, pair.with_parameters) == (MIDDLE, None, False)
    # The formulas alone are the same: there is nothing to measure.
    assert pair.observed is None


def test_a_file_of_itself_is_no_difference_and_nothing_is_run(
    port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]
) -> None:
    book, calls = read_back(stock, batch), []
    port.register_forward_pre_hook(lambda *_: calls.append(1))
    assert not compare(port, book, batch).differs
    # Once on a few tokens, to find the norms.
    assert len(calls) == 1
