"""`nk.fold` on models in memory: the same answers, nothing half done, and the way back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.checkpoint.logits import true_logits
from normkit.errors import InputError, KindError, ModelError
from planned_models import ALL
from tiny_models import tiny

# A few hundred float64 roundings of logits near 10.
CLOSE = 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "bert", "mixtral"])
def test_answers_stay_and_come_back(family):
    model, inputs = tiny(family)
    before = true_logits(model, **inputs)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folding = nk.fold(model, operations=ALL, untie=True)
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state[name])]
    assert len(changed) > len(state) / 3
    assert (true_logits(model, **inputs) - before).abs().max() <= CLOSE
    nk.fold(model, inverse=folding)
    assert (true_logits(model, **inputs) - before).abs().max() <= CLOSE
    for norm in folding.plan.norms:
        for name in (f"{norm.name}.weight", f"{norm.name}.bias"):
            assert name not in state or torch.equal(model.state_dict()[name], state[name])


def test_columns_that_a_zero_gain_wiped_out_come_back_bit_for_bit():
    model, _ = tiny("llama")
    norm, reader = model.model.layers[0].input_layernorm, model.model.layers[0].self_attn.q_proj
    column = int((norm.weight == 0).nonzero()[0])
    before = reader.weight[:, column].detach().clone()
    assert bool((before != 0).all())
    folding = nk.fold(model)
    assert bool((reader.weight[:, column] == 0).all())
    nk.fold(model, inverse=folding)
    assert torch.equal(reader.weight[:, column], before)


def test_layernorms_become_rmsnorms_and_layernorms_again():
    model, inputs = tiny("gpt2", tied=False)
    before, norms = true_logits(model, **inputs), [model.transformer.h[0].ln_1, model.transformer.ln_f]
    folding = nk.fold(model, operations=["rms"])
    assert isinstance(model.transformer.h[0].ln_1, nk.Norm)
    assert not model.transformer.ln_f.spec.centre_numerator
    assert model.config.normkit["norms"].keys() == folding.plan.swaps.keys()
    assert (true_logits(model, **inputs) - before).abs().max() <= CLOSE
    nk.fold(model, inverse=folding)
    assert [model.transformer.h[0].ln_1, model.transformer.ln_f] == norms
    assert not hasattr(model.config, "normkit")


def test_an_eps_that_was_set_by_hand_is_not_lost():
    model, _ = tiny("opt", tied=False, eps=1e-2)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        InputError, match=r"expected eps 1e-05 in model\.decoder\.layers\.0\.self_attn_layer_norm.* got 0.01"
    ):
        nk.fold(model, operations=["rms"])
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_head_that_is_untied_has_a_table_of_its_own_and_saves_so(tmp_path):
    model, inputs = tiny("gpt2", tied=True)
    before = true_logits(model, **inputs)
    nk.fold(model, untie=True)
    assert model.lm_head.weight is not model.transformer.wte.weight
    assert model.config.tie_word_embeddings is False
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert (true_logits(again, **inputs) - before).abs().max() <= CLOSE


def test_a_nan_or_a_product_too_large_in_the_last_matrix_leaves_the_model_as_it_was():
    model, _ = tiny("llama")
    with torch.no_grad():
        model.model.layers[-1].mlp.up_proj.weight[3, 5] = float("nan")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=r"up_proj\.weight holds a NaN"):
        nk.fold(model)
    assert all(torch.equal(tensor, state[name]) or "up_proj" in name for name, tensor in model.state_dict().items())
    model, _ = tiny("llama", dtype=torch.float16)
    with torch.no_grad():
        model.model.layers[-1].mlp.up_proj.weight[3, :] = 60_000.0
        model.model.layers[-1].post_attention_layernorm.weight[0] = 2.0
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=r"up_proj\.weight does not fit into F16"):
        nk.fold(model)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_transposed_storage_is_written_through():
    model, inputs = tiny("llama")
    before = true_logits(model, **inputs)
    linear = model.model.layers[0].self_attn.q_proj
    linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
    assert not linear.weight.is_contiguous()
    nk.fold(model)
    assert (true_logits(model, **inputs) - before).abs().max() <= CLOSE


def test_the_text_of_a_folding_says_what_was_left_and_a_refusal_is_one_line():
    model, _ = tiny("gpt2", tied=True)
    text = str(nk.fold(model))
    assert text.splitlines()[0] == "4 of 5 norms folded, 0 made RMSNorms"
    assert "left: transformer.ln_f (final): its reader lm_head shares the table" in text
    with pytest.raises(KindError, match="expected a model of transformers, got Linear"):
        nk.fold(nn.Linear(2, 2))
    model, _ = tiny("llama")
    with pytest.raises(InputError, match=r"nothing of what was asked can be done: residual: .* is an RMSNorm"):
        nk.fold(model, operations=["centre"])
    with pytest.raises(InputError, match="operations are"):
        nk.fold(model, operations=["gains"])
