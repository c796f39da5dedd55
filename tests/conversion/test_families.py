"""Model families of transformers, converted: as near to float64 as before, as docs/reference/conversions.md says."""

from __future__ import annotations

import pytest
import torch
import transformers

import conversions
from configurations import Family

# Whole families of transformers; the swap itself has quick tests.
pytestmark = pytest.mark.slow

PAGE = conversions.PAGE.read_text(encoding="utf-8")
# As a test holds, these are all: to list them from transformers is to import all its configurations.
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and " of " in line]
NAMES = [line.split(" ")[1] for line in ROWS]
# Every kind of norm that a family of transformers has, and every way to be left alone; then others with norms of these.
QUICK = ("cohere", "convnext", "deberta", "gemma3_text", "gpt2", "llama", "nemotron", "olmo")
QUICK += ("qwen3_next", "resnet", "t5")
LIKE = ("bart", "bert", "deepseek_v3", "olmo2", "wav2vec2")
# What the family's modelling file has: norms that are gated or over a batch stay, all others are swapped.
SWAPPED = {"bart": 12, "bert": 6, "gpt2": 5, "llama": 5, "olmo2": 9, "qwen3_next": 7, "resnet": 0, "t5": 12}


@pytest.fixture(autouse=True)
def _quiet():
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture(scope="module")
def built() -> dict[str, Family]:
    """The families by name."""
    return {family.name: family for family in conversions.convertible()}


def assert_as_promised(family: Family) -> None:
    done = conversions.measure(family)
    assert done.violations == {}
    assert done.after.keys() == done.before.keys()
    assert conversions.row(done) in PAGE.splitlines()
    assert done.swapped == SWAPPED.get(family.name, done.swapped)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*QUICK, *LIKE])
def test_a_converted_family_is_as_near_to_float64(name, built):
    assert_as_promised(built[name])


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*QUICK, *LIKE)][::12])
def test_a_twelfth_of_the_others_is_as_near_to_float64(name, built):
    """Those above hold every kind of norm that there is; `census/conversions.py --check` asks all."""
    assert_as_promised(built[name])


def test_the_page_has_every_family(built):
    assert list(built) == NAMES
    assert len(ROWS) >= 300
    whole = [line for line in ROWS if line.endswith("|  |") and "| 0 of" not in line]
    assert f"all of them in {len(whole)} families" in PAGE


@pytest.mark.sampled(1)
@pytest.mark.parametrize("factor", [1.0, 1 + 1e-5])
def test_a_gain_that_is_a_little_off_is_outside_the_contract(monkeypatch, built, factor):
    convert = conversions.convert

    def converted(model: torch.nn.Module, batch: object) -> object:
        report = convert(model, batch)
        for swapped in report.swapped:
            model.get_submodule(swapped.path).register_forward_hook(lambda _module, _args, y: y * factor)
        return report

    monkeypatch.setattr(conversions, "convert", converted)
    assert bool(conversions.measure(built["olmo2"]).violations) is (factor != 1.0)


def test_in_float64_nothing_asks_for_float32():
    with conversions.in_float64():
        x = torch.ones(3)
        assert (
            x.dtype == x.float().dtype == x.to(torch.float32).dtype == torch.softmax(x, -1, dtype=torch.float32).dtype
        )
    assert torch.ones(3).dtype == torch.float32
