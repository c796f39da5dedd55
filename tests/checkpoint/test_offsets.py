"""`unoffset`: a Gemma 1 becomes a Granite with plain gains; what no stock class expresses is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from folded_checkpoints import check, failed, flipped, folded, tensors
from folding_cases import BAR, difference, reasons, results
from normkit.checkpoint import fold, verify
from normkit.checkpoint.loading import load
from normkit.checkpoint.memory import fold as fold_in_memory
from normkit.errors import InputError
from planned_models import model_of, plan_of
from tiny_models import tiny

NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("class_name", ["GemmaForCausalLM", "GemmaModel"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "operations", [["unoffset"], ["gain", "bias", "final", "unoffset"], ["scale", "unoffset"], ["rotate", "unoffset"]]
)
def test_a_gemma_is_a_granite_with_plain_gains(class_name, tied, operations, tmp_path: Path):
    model, inputs = tiny("gemma", tied=tied, class_name=class_name)
    model.save_pretrained(tmp_path / "a")
    fold(tmp_path / "a", tmp_path / "b", operations=operations, halvings=2 * ("scale" in operations))
    assert failed(verify(tmp_path / "a", tmp_path / "b")) == {}
    found = load(tmp_path / "b")
    assert type(found).__name__ == class_name.replace("Gemma", "Granite")
    assert difference(results(model, inputs), results(found, inputs)) <= BAR


@pytest.mark.slow
def test_gains_are_rounded_once_and_a_bit_is_named(tmp_path: Path):
    pair = folded(tmp_path, "gemma", torch.bfloat16, operations=["unoffset"])
    found = verify(pair.source, pair.result)
    assert failed(found) == {}
    assert "largest residual of a sum 0.00" in check(found, "figures").what
    before, after = (load(folder).state_dict()[NORM] for folder in (pair.source, pair.result))
    assert torch.equal(after, (1 + before.double()).bfloat16())
    assert "gains become 1 + weight, rounded to 16 bits" in pair.certificate["plan"]["remarks"][0]
    place = tensors(pair.result)[NORM]
    with flipped(place.file, place.start):
        assert failed(verify(pair.source, pair.result))["sum"].startswith(f"{NORM}[0] is ")


def test_what_no_stock_class_expresses_is_refused_with_the_reason():
    for family, words in (
        ("llama", "its gains are stored plain"),
        ("gemma2", "its scores and logits are capped, and no stock class with plain gains does both"),
        ("gemma3", "no stock class with plain gains has norms before and behind both branches"),
    ):
        (reason,) = reasons(plan_of(model_of(family), "unoffset"), "unoffset").values()
        assert reason.startswith(words)
    headed = plan_of(model_of("gemma", class_name="GemmaForSequenceClassification"), "unoffset").refusals[0]
    assert headed.reason == "the family granite, which has plain gains, has no class for it"
    sided = plan_of(model_of("gemma", use_bidirectional_attention=True), "unoffset").refusals[0]
    assert sided.reason.startswith("a Granite, which has plain gains, has no bidirectional attention")
    with pytest.raises(InputError, match="it would become a GraniteForCausalLM, and a model in memory keeps its class"):
        fold_in_memory(model_of("gemma"), operations=["unoffset"])
