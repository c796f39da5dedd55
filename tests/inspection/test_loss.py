"""The loss of the next token, against transformers' own; none where a model sees later tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from normkit.inspection.inspecting import inspect
from normkit.inspection.loss import NextTokenLoss


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.slow
def test_it_is_the_models_own_loss_over_all_batches(gpt2: GPT2LMHeadModel, monkeypatch: pytest.MonkeyPatch) -> None:
    # 7 tokens of 64 logits at a time: the parts do not end with the rows.
    monkeypatch.setattr("normkit.inspection.loss._MOST_LOGITS", 7 * 64 + 3)
    batches = [{"input_ids": torch.randint(64, size)} for size in ((3, 20), (1, 11))]
    losses = [float(gpt2(**batch, labels=batch["input_ids"]).loss) for batch in batches]
    expected = (losses[0] * 57 + losses[1] * 10) / 67
    # Both add 67 float32 numbers near 4.
    assert inspect(gpt2, batches).model.loss == pytest.approx(expected, rel=1e-6)


def test_padding_on_either_side_does_not_count(gpt2: GPT2LMHeadModel) -> None:
    ids = torch.randint(64, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, 8:], mask[1, :3] = 0, 0
    batch = {"input_ids": ids, "attention_mask": mask}
    labels = ids.where(mask.bool() & mask.roll(1, 1).bool(), torch.tensor(-100))
    loss = NextTokenLoss(gpt2, batch, gpt2(**batch))
    loss.add(batch, gpt2(**batch))
    assert loss.value == pytest.approx(float(gpt2(**batch, labels=labels).loss), rel=1e-6)


def test_a_module_of_ones_own_that_returns_a_tuple() -> None:
    batch = {"idx": torch.arange(24).view(2, 12)}

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Embedding(64, 16)
            self.head = torch.nn.Linear(16, 64)

        def forward(self, idx: torch.Tensor) -> tuple[torch.Tensor, None]:
            return self.head(self.inner(idx)), None

    model = Own()
    loss = NextTokenLoss(model, batch, model(**batch))
    loss.add(batch, model(**batch))
    logits = model(**batch)[0][:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch["idx"][:, 1:].flatten())
    assert loss.value == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("kind", ["masked", "encoder-decoder", "hidden states"])
def test_a_model_that_sees_later_tokens_has_none(gpt2: GPT2LMHeadModel, kind: str) -> None:
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids}
    small = {"vocab_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 16}
    if kind == "masked":
        model = BertForMaskedLM(BertConfig(**small, intermediate_size=16)).eval()
    elif kind == "hidden states":
        model = gpt2.transformer
    else:
        batch["decoder_input_ids"] = ids
        model = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1)).eval()
    loss = NextTokenLoss(model, batch, model(**batch))
    loss.add(batch, model(**batch))
    assert math.isnan(loss.value)
