"""The sentence that names a cause: planted faults in stored gains, eps and norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from normkit.comparison.comparing import compare_sides
from normkit.comparison.differences import Comparison, Wiring
from normkit.comparison.row_causes import RowCause
from normkit.comparison.rows import Rows
from normkit.comparison.sides import Side, open_side

Gains = dict[str, Tensor]

PATHS = [f"model.layers.{layer}.{name}" for layer in range(4) for name in ("q_norm", "input_layernorm")]


@pytest.fixture(scope="module")
def gains() -> Gains:
    generator = torch.Generator().manual_seed(0)
    return {f"{path}.weight": torch.randn(64, generator=generator) for path in PATHS}


def side(gains: Gains, runtime: str = "", eps: float = 1e-6) -> Side:
    opened = open_side({name: gain.clone() for name, gain in gains.items()})
    assert opened.weights is not None
    architecture = {"llama.cpp": "gemma3", "transformers": "gemma3_text"}.get(runtime, "")
    return replace(opened, weights=replace(opened.weights, runtime=runtime, architecture=architecture, eps={"": eps}))


def compared(port: Side, reference: Side) -> Comparison:
    return compare_sides(port, reference, progress=lambda *_: None)


def plus(gains: Gains, number: float, kind: str = "") -> Gains:
    return {name: gain + number if kind in name else gain + 1 for name, gain in gains.items()}


def test_what_llama_cpp_stores_is_no_cause(gains: Gains) -> None:
    found = compared(side(plus(gains, 1), "llama.cpp"), side(gains, "transformers"))
    assert (found.causes, found.differs) == ((), False)


@pytest.mark.parametrize(
    ("made", "sentence", "remedy"),
    [
        (
            lambda gains: plus(gains, 2, "q_norm"),
            "4 gains of query norms hold the reference's + 2. The 1 was added twice: llama.cpp adds nothing to it and "
            "computes gains + 1.",
            "convert them anew from reference, and add the 1 once",
        ),
        (
            lambda gains: plus(gains, 0),
            "All 8 gains hold the reference's values. The 1 was dropped: llama.cpp adds nothing to it and computes "
            "gains - 1.",
            "convert them anew from reference, and add the 1",
        ),
    ],
)
def test_a_doubled_and_a_dropped_one(gains: Gains, made: Callable[[Gains], Gains], sentence: str, remedy: str) -> None:
    found = compared(side(made(gains), "llama.cpp"), side(gains, "transformers"))
    assert [(cause.level, cause.sentence, cause.remedy) for cause in found.causes] == [("values", sentence, remedy)]
    assert found.differs


def test_swapped_copied_and_missing_gains_and_what_of_it_is_wiring(gains: Gains) -> None:
    one, other, last = (f"{path}.weight" for path in (PATHS[1], PATHS[5], PATHS[7]))
    found = compared(side({**gains, one: gains[other], other: gains[one]}), side(gains))
    [cause] = found.causes
    assert cause.sentence == f"The gains of two norms are swapped: {one} and {other}."
    assert {*cause.places} == {PATHS[1], PATHS[5]}
    assert found.wiring == Wiring(seen_in=("values",), paired_by={"name": 8}, missing=(), extra=(), causes=(cause,))
    found = compared(side({**gains, one: gains[other]}), side(gains))
    [cause] = found.causes
    assert cause.sentence == f"{one} holds a copy of the gain of {PATHS[5]}, 2 layers further."
    assert (cause.level, found.wiring.causes) == ("values", ())
    found = compared(side({name: gain for name, gain in gains.items() if name != last}), side(gains))
    [cause] = found.causes
    assert cause.sentence == f"{last} of the reference is missing."
    assert (cause.level, found.wiring.missing, found.wiring.extra) == ("wiring", (PATHS[7],), ())
    assert found.to_json()["wiring"]["causes"][0]["sentence"] == cause.sentence


def test_what_allows_both_is_undecided(gains: Gains) -> None:
    """Without a config nobody says whether a runtime adds 1."""
    found = compared(side(plus(gains, 1)), side(gains))
    assert (found.verdict, found.differs, found.to_json()["verdict"]) == ("undecided", False, "undecided")
    assert compared(side(gains), side(gains)).verdict == "the same"
    assert compared(side(plus(gains, 2), "llama.cpp"), side(gains, "transformers")).verdict == "different"


def test_eps_is_told_once(gains: Gains) -> None:
    [cause] = compared(side(gains, "transformers", 1e-5), side(gains, "transformers")).causes
    assert cause.sentence == "8 of 8 norms have eps 1e-05 instead of 1e-06."
    assert cause.remedy == "write the reference's eps into the config.json of port"


@pytest.mark.slow
def test_the_cause_comes_before_what_follows_from_it() -> None:
    """One gain and the eps of another norm: rows show both, and are told with neither a second time."""
    torch.manual_seed(0)
    port, stock = (nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.LayerNorm(64)) for _ in "ab")
    port.load_state_dict(stock.state_dict())
    port[3].eps = 1e-2
    gain = torch.randn(64)
    with torch.no_grad():
        for model, extra in ((stock, 0), (port, 1)):
            model[1].weight.copy_(gain + extra)
    found = compare_sides(open_side(port), open_side(stock), torch.randn(64, 8), progress=lambda *_: None)
    assert [cause.level for cause in found.causes] == ["values", "metadata"]
    assert found.rows.birth is not None
    assert found.rows.birth.path == "1"


def test_a_copy_that_the_files_show_is_not_told_again_from_rows(gains: Gains) -> None:
    one, other = PATHS[2], PATHS[3]
    rows = Rows(
        causes=(
            RowCause(kind="gain", paths=(one, other), words=f"{one} has the gain of {other}"),
            RowCause(kind="gain", paths=(other, one), words=f"{other} has the gain of {one}"),
        )
    )
    found = compared(side({**gains, f"{one}.weight": gains[f"{other}.weight"]}), side(gains))
    assert [cause.sentence for cause in replace(found, rows=rows).causes] == [
        f"{one}.weight holds a copy of the gain of {other} of the same layer.",
        f"{other} has the gain of {one}.",
    ]


def test_gains_in_eight_bits_and_in_another_order(gains: Gains) -> None:
    rounded = {name: gain.to(torch.float8_e5m2).float() for name, gain in gains.items()}
    [cause] = compared(side(rounded, "transformers"), side(gains, "transformers")).causes
    words = "All 8 gains hold the reference's values, rounded to float8_e5m2: too few digits for a gain."
    assert cause.sentence == words
    assert cause.remedy == "convert them anew from reference, in 16 bits or more"
    turned = {name: gain.flip(0) if "q_norm" in name else gain for name, gain in gains.items()}
    [cause] = compared(side(turned, "transformers"), side(gains, "transformers")).causes
    assert cause.sentence == (
        "4 gains of query norms: reference in another order (reversed); wrong: transformers reads them in the "
        "reference's order."
    )
