"""One training step: its loss, what it leaves of the model, and how its findings join those of an inspection."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from normkit.checkpoint.loading import LoadedModel
from normkit.cli.training import joined, training_step
from normkit.errors import InputError, ModelError
from normkit.identification import products
from normkit.inspection.inspecting import inspect
from normkit.inspection.result import Inspection
from normkit.measurement.texts import Batches, from_random_ids
from normkit.rules.finding import Check, Finding

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def loaded(model: Any) -> LoadedModel:
    return LoadedModel(
        model=model.eval(), tokenizer=None, name="tiny", architecture="Tiny", path=Path("tiny"), notes=()
    )


def batches(model: Any) -> Batches:
    return from_random_ids(model, length=8, max_tokens=32, batch_size=4)


def gpt2(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2} | changes
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))


def loss_seen(model: Any) -> float:
    training = training_step(loaded(model), batches(model)).training
    assert training is not None
    return training.of("loss")[0].last


def next_token_loss(model: Any) -> float:
    ids = batches(model).batches[0]["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def test_the_loss_is_that_of_the_next_token_also_without_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    assert loss_seen(model) == pytest.approx(next_token_loss(model), rel=1e-5)
    whole = type(model).forward

    def forward(self: Any, input_ids: Any, attention_mask: Any = None, use_cache: bool = False) -> Any:
        return whole(self, input_ids, attention_mask=attention_mask, use_cache=use_cache)

    monkeypatch.setattr(type(model), "forward", forward)
    assert loss_seen(model) == pytest.approx(next_token_loss(model), rel=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        lambda: BertForMaskedLM(BertConfig(vocab_size=64, max_position_embeddings=32, **SIZES)),
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
        ),
    ],
)
def test_masked_models_and_encoder_decoders_use_their_own_loss(model: Any) -> None:
    torch.manual_seed(0)
    assert 0 < loss_seen(model()) < 10


def test_a_classifier_has_no_loss_of_token_ids() -> None:
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=64, pad_token_id=0, **SIZES))
    with pytest.raises(InputError, match=r"^LlamaForSequenceClassification has no loss .* nk\.watch"):
        training_step(loaded(model), batches(model))


def test_a_loss_without_a_gradient_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2()
    whole = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, labels=None, **kwargs: torch.no_grad()(whole)(
        *args, labels=labels, **kwargs))  # fmt: skip
    with pytest.raises(ModelError, match="GPT2LMHeadModel cannot be differentiated"):
        training_step(loaded(model), batches(model))


def test_the_model_and_the_random_numbers_are_as_they_were() -> None:
    model = gpt2()
    model.transformer.wpe.requires_grad_(False)
    model.register_buffer("count", torch.zeros(1))

    def count(*_: Any) -> None:
        if model.training:
            model.count.add_(1)

    model.transformer.register_forward_pre_hook(count)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    for _ in range(2):
        training_step(loaded(model), batches(model))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state)
        assert {parameter.grad for parameter in model.parameters()} == {None}
        assert not model.transformer.wpe.weight.requires_grad
        assert not any(module.training for module in model.modules())
    with torch.no_grad():
        assert model(torch.zeros(1, 4, dtype=torch.long)).logits.isfinite().all()


def test_dropout_is_on_and_repeats() -> None:
    model = gpt2(resid_pdrop=0.5)
    assert loss_seen(model) == loss_seen(model) != pytest.approx(next_token_loss(model), rel=1e-5)


def finding(rule: str, severity: Any) -> Finding:
    words = dict.fromkeys(("title", "measured", "threshold", "source", "why", "confirm"), "words")
    return Finding(rule=rule, severity=severity, sites=(), evidence=(), remedy=(), **words)


def test_findings_of_both_stand_worst_first_and_a_check_counts_where_it_could_be_made() -> None:
    model = gpt2()
    step = training_step(loaded(model), batches(model))
    base = inspect(model, batches(model).batches)

    def told(inspection: Inspection, *found: Finding, **statuses: Any) -> Inspection:
        checks = tuple(Check(rule=rule, title="words", status=status) for rule, status in statuses.items())
        return dataclasses.replace(inspection, findings=found, checks=checks)

    ours = told(base, finding("A1", "note"), A1="finding", A2="clean", B1="not checked", B2="not checked")
    theirs = told(step, finding("A1", "error"), finding("A2", "error"), A1="finding", A2="finding", B1="clean")
    both = joined(ours, theirs)
    assert [(found.rule, found.severity) for found in both.findings] == [("A2", "error"), ("A1", "note")]
    assert [check.status for check in both.checks] == ["finding", "finding", "clean", "not checked"]
    assert both.training is step.training
    assert both.walk is base.walk


def test_products_of_16_bits_run_in_float32(monkeypatch):
    """On a CPU without instructions for bfloat16; the loss stays within a few roundings of it, 2^-8 each."""
    model, differentiated = gpt2().bfloat16(), []
    expected, backward = next_token_loss(model), products._Linear.backward
    monkeypatch.setattr(products, "software_dtypes", lambda: frozenset([torch.bfloat16]))
    monkeypatch.setattr(
        products._Linear, "backward", lambda ctx, dy: differentiated.append(dy.dtype) or backward(ctx, dy)
    )
    assert loss_seen(model) == pytest.approx(expected, rel=2**-6)
    # The head: GPT-2's other maps are no `F.linear`.
    assert set(differentiated) == {torch.bfloat16}
