"""What is written to a sum is centred, where nothing there sees the mean."""

from __future__ import annotations

import pytest

from normkit.checkpoint.gains import move_affine
from normkit.checkpoint.streams import become_rms, centre_writers, other_class
from normkit.spec import NormSpec
from planned_models import edits_of, model_of, request_on


def test_every_writer_of_a_layernorm_model_is_centred_along_its_output():
    request, draft = request_on(model_of("gpt2", tied=False), "centre")
    centred = centre_writers(request, draft)
    assert set(centred) == {
        *("transformer.wte.weight", "transformer.wpe.weight"),
        *(f"transformer.h.{layer}.{part}.c_proj" for layer in (0, 1) for part in ("attn", "mlp")),
    }
    assert draft.refusals == ()
    edits = edits_of(draft)
    # Conv1D: (in, out).
    assert edits["transformer.h.0.mlp.c_proj.weight"].centred_axis == 1
    assert edits["transformer.wte.weight"].centred_axis == 1
    assert edits["transformer.h.0.mlp.c_proj.bias"].value.is_centred


def test_a_linear_map_is_centred_along_its_first_axis():
    request, draft = request_on(model_of("gpt_neox", tied=False), "centre")
    centre_writers(request, draft)
    assert edits_of(draft)["gpt_neox.layers.0.mlp.dense_4h_to_h.weight"].centred_axis == 0


def test_a_tied_table_is_refused_by_name_and_the_rest_is_centred():
    request, draft = request_on(model_of("gpt2", tied=True), "centre")
    assert len(centre_writers(request, draft)) == 5
    assert [(refusal.operation, refusal.place) for refusal in draft.refusals] == [("centre", "transformer.wte.weight")]


def test_rmsnorm_models_are_never_centred():
    request, draft = request_on(model_of("llama"), "centre")
    assert centre_writers(request, draft) == ()
    assert "is an RMSNorm, which sees the mean" in draft.refusals[0].reason
    assert {edit.relation for edit in edits_of(draft).values()} == {"identical"}


@pytest.mark.parametrize("eps", [1e-6, 10.0])
def test_a_layernorm_becomes_an_rmsnorm_with_its_own_eps(eps):
    request, draft = request_on(model_of("gpt_neox", tied=False, eps=eps), "rms")
    changes = tuple(move_affine(request, draft, norm) for norm in request.graph.norms)
    changed, swaps = become_rms(request, draft, changes)
    assert all(change.becomes_rms for change in changed)
    assert set(swaps) == {norm.name for norm in request.graph.norms}
    assert swaps["gpt_neox.final_layer_norm"] == NormSpec(centre_numerator=False, centre_statistics=False, eps=eps)


def test_norms_of_a_post_norm_model_stay_but_for_the_first():
    request, draft = request_on(model_of("bert", tied=False), "rms")
    centre_writers(request, draft)
    changes = tuple(move_affine(request, draft, norm) for norm in request.graph.norms)
    _, swaps = become_rms(request, draft, changes)
    assert list(swaps) == ["bert.embeddings.LayerNorm"]
    reasons = {refusal.place: refusal.reason for refusal in draft.refusals}
    assert "gain and bias give it a mean" in reasons["bert.encoder.layer.1.output.LayerNorm"]


def test_an_olmo_becomes_a_llama_with_gains_of_one():
    request, draft = request_on(model_of("olmo", tied=False), "rms")
    written, dropped = other_class(request, draft, len(request.graph.norms))
    assert (written["model_type"], written["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert written["rms_norm_eps"] == pytest.approx(1e-5)
    assert "clip_qkv" in dropped
    created = [edit for edit in edits_of(draft).values() if edit.relation == "constant"]
    assert {edit.name for edit in created} == {f"{norm.name}.weight" for norm in request.graph.norms}
    assert {edit.value.value for edit in created} == {1.0}
