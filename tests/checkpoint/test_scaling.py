"""`scale`: the residual stream halved some times, eps with it, and no number loses a bit."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from folded_checkpoints import check, failed, flipped, folded, tensors, write_certificate
from folding_cases import BAR, FLAGS, TIES, difference, reasons, results
from normkit.checkpoint import verify
from normkit.checkpoint.build_model import replay
from normkit.checkpoint.loading import load
from normkit.checkpoint.memory import fold
from normkit.checkpoint.opening import open_model
from normkit.checkpoint.planning import make_plan
from normkit.errors import InputError
from normkit.spec import NormSpec
from planned_models import model_of, plan_of
from tiny_models import tiny

ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "mpnet", "electra", "electra_wide")
REFUSED = {
    "olmo": "stands in the code of its class",
    "opt": "stands in the code of its class",
    "opt_post_norm": "stands in the code of its class",
    "whisper": "stands in the code of its class",
    "distilbert": "stands in the code of its class",
    "bart": "stands in the code of its class",
    "mbart": "stands in the code of its class",
    "clip_vision": "CLIPVisionModelWithProjection returns the residual",
    **dict.fromkeys(
        (*ENCODERS, "siglip_vision", "qwen3_next", "qwen3_5_text", "wav2vec2", "wav2vec2_stable"),
        "normalizes no sum of linear maps",
    ),
    **dict.fromkeys(
        ("hubert", "hubert_stable", "wavlm", "wavlm_stable", "deberta-v2", "albert"), "normalizes no sum of linear maps"
    ),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), "normalizes no sum of linear maps"),
    **dict.fromkeys(("nemotron_h", "nemotron_h_latent"), "normalizes no sum of linear maps"),
    "modernbert": "normalizes no sum of linear maps",
    "modernbert_bias": "normalizes no sum of linear maps",
}


def halved(family: str, halvings: int = 3, operations: tuple[str, ...] = ("scale",), **options: object) -> float:
    """The largest difference after a fold in memory; 0 where it is refused with the reason."""
    model, inputs = tiny(family, **options)
    before = results(model, inputs)
    untie = options.get("tied") is None
    if family in REFUSED:
        said = [refusal.reason for refusal in plan_of(model, "scale", halvings=halvings, untie=untie).refusals]
        assert any(words in reason for reason in said for words in (REFUSED[family], "stands between"))
        return 0.0
    fold(model, operations=operations, halvings=halvings, untie=untie)
    return difference(before, results(model, inputs))


@pytest.mark.slow
@pytest.mark.sampled(12)
@pytest.mark.parametrize(("family", "tied"), TIES)
def test_halved_often_a_model_computes_the_same(family, tied):
    assert halved(family, 5, tied=tied, eps=1e-2) <= BAR


WITH_FIXED_EPS = ["olmo", "opt", "opt_post_norm", "bert", "distilbert", "modernbert", "electra"]


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", WITH_FIXED_EPS)
def test_with_an_eps_that_cannot_follow_it_computes_what_the_source_does_with_another(family):
    model, inputs = tiny(family)
    before, source = results(model, inputs), copy.deepcopy(model)
    plan = fold(model, operations=["scale"], halvings=4, fixed_eps=True, untie=True).plan
    assert plan.acts_as
    after = results(model, inputs)
    replay(source, {path: NormSpec.from_json(spec) for path, spec in plan.acts_as.items()}, "the plan")
    assert difference(results(source, inputs), after) <= BAR
    assert "cannot follow what is halved 4 times" in " ".join(plan.remarks)
    # Another eps is another model, though not by much.
    assert BAR < difference(before, after) < 0.5 * max(float(value.abs().max()) for value in before.values())


def test_the_length_of_a_row_changes_by_no_more_than_is_derived():
    rows = torch.randn(500, 32, dtype=torch.float64) * torch.logspace(-3, 1, 500, dtype=torch.float64)[:, None]
    for halvings in (1, 5, 9):
        for kind in ("rms", "layer"):
            variance = rows.square().mean(-1) if kind == "rms" else rows.var(-1, unbiased=False)
            for eps in (1e-12, 1e-5, 1e-2):
                share = (1 + (4.0**halvings - 1) * eps / (variance + eps)) ** -0.5
                # Each side has a few roundings of numbers near 1.
                assert (1 - share <= (4.0**halvings - 1) * eps / (2 * variance) + 1e-15).all()
                longer = ((variance + eps) / (variance + eps * 0.25**halvings)).sqrt()
                assert (longer - 1 <= eps / (2 * variance) + 1e-15).all()


@pytest.mark.slow
def test_on_disk_it_is_proved_with_an_eps_that_stands_in_code(tmp_path):
    pair = folded(tmp_path, "opt", torch.bfloat16, operations=["scale"], halvings=4, fixed_eps=True, untie=True)
    assert failed(verify(pair.source, pair.result)) == {}
    document = pair.certificate
    assert document["asked"]["options"] == {"halvings": 4, "fixed_eps": True}
    eps = {spec["eps"] for spec in document["plan"]["acts_as"].values()}
    assert eps == {1e-5 * 4.0**4}
    document["plan"]["acts_as"]["model.decoder.final_layer_norm"]["eps"] = 1e-5
    write_certificate(pair.result, document)
    assert failed(verify(pair.source, pair.result)).keys() == {"plan"}


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("family", "flags"), FLAGS)
def test_so_it_does_with_flags_and_with_everything_else(family, flags):
    assert halved(family, **flags) <= BAR
    every = ("gain", "bias", "final", "centre", "rms", "value", "scale")
    assert halved(family, 2, every, **flags) <= BAR


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["t5", "llama", "qwen3", "gpt2", "olmo2"])
def test_in_bfloat16_no_bit_is_lost_and_a_changed_exponent_is_named(family, tmp_path):
    pair = folded(tmp_path, family, torch.bfloat16, operations=["scale"], halvings=4, untie=True)
    found = verify(pair.source, pair.result)
    assert failed(found) == {}
    assert check(found, "figures").what == "no sum was rounded, no power of two lost a bit"
    assert {entry["relation"] for entry in pair.certificate["tensors"].values()} == {"identical", "power"}
    inputs = tiny(family)[1]
    before, after = (load(folder, dtype="float64") for folder in (pair.source, pair.result))
    assert difference(results(before, inputs), results(after, inputs)) <= BAR
    name, place = next(
        (name, place)
        for name, place in tensors(pair.result).items()
        if pair.certificate["tensors"][name]["relation"] == "power"
    )
    with flipped(place.file, place.start):
        assert failed(verify(pair.source, pair.result))["power"].startswith(f"{name}[0")
    document = pair.certificate
    document["asked"]["options"]["halvings"] = 3
    write_certificate(pair.result, document)
    faults = failed(verify(pair.source, pair.result))
    assert {"plan", "power", "config.json"} <= faults.keys()


@pytest.mark.parametrize(
    ("family", "operations", "norm", "power", "offset"),
    [
        ("gemma3", ["scale"], "model.layers.0.post_attention_layernorm.weight", -3, 1.0),
        # Its head shares the table, and the norm in front of it makes up for the halvings; it then becomes plain.
        ("gemma", ["scale", "unoffset"], "model.norm.weight", 3, 0.0),
    ],
)
def test_a_float32_gain_that_is_stored_less_1_is_rounded_once(tmp_path, family, operations, norm, power, offset):
    pair = folded(tmp_path, family, torch.float32, operations=operations, halvings=3)
    assert failed(verify(pair.source, pair.result)) == {}
    before, after = (
        {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
        for folder in (pair.source, pair.result)
    )
    exact = 2.0**power * (before[norm].double() + 1) - offset
    assert torch.equal(after[norm], exact.float())
    assert not torch.equal(after[norm].double(), exact)
    assert pair.certificate["tensors"][norm]["relation"] == "sum"
    said = "stored less 1 in float32, are rounded to it once more" if offset else "stored less 1 in float32, is rounded"
    assert any(said in remark for remark in pair.certificate["plan"]["remarks"])


def test_what_cannot_be_halved_is_refused_with_the_reason():
    asked = {"halvings": 3, "untie": True}
    gemma = reasons(plan_of(model_of("gemma3", dtype=torch.bfloat16), "scale", **asked), "scale")
    assert "BF16 does not hold weight for 2^-3 (1 + weight) - 1; fold with dtype float32" in next(iter(gemma.values()))
    headless = model_of("llama", class_name="LlamaModel")
    assert plan_of(headless, "scale", halvings=3).refusals == ()
    gpt2 = plan_of(model_of("gpt2"), "scale", halvings=24).refusals
    assert not gpt2
    tiny_eps = reasons(plan_of(model_of("vit", eps=1e-30), "scale", halvings=24), "scale")
    assert "is below what float32 holds" in next(iter(tiny_eps.values()))
    for options in ({}, {"halvings": 25}):
        with pytest.raises(InputError, match="scale takes 1 to 24 halvings, got"):
            plan_of(model_of("llama"), "scale", **options)
    with pytest.raises(InputError, match="fixed_eps is for scale, got it with gain"):
        plan_of(model_of("llama"), "gain", fixed_eps=True)
    with pytest.raises(InputError, match="got 3 with gain"):
        plan_of(model_of("llama"), "gain", halvings=3)


def test_query_norms_of_which_the_projection_is_not_declared_are_refused():
    opened = open_model(model_of("qwen3"))
    norms = tuple(dataclasses.replace(norm, of=()) for norm in opened.graph.norms)
    opened.__dict__["graph"] = dataclasses.replace(opened.graph, norms=norms)
    (refusal,) = make_plan(opened, operations=["scale"], halvings=3).refusals
    expected = "it has the eps of the norms that read the residual, and it normalizes no sum of linear maps"
    expected += "; fixed_eps accepts that it acts as another"
    assert (refusal.place, refusal.reason) == ("model.layers.0.self_attn.q_norm", expected)


def test_in_memory_it_is_undone_bit_for_bit():
    model, inputs = tiny("t5", tied=True)
    before, state = results(model, inputs), {name: value.clone() for name, value in model.state_dict().items()}
    eps = model.config.layer_norm_epsilon
    folding = fold(model, operations=["scale"], halvings=6)
    assert model.config.layer_norm_epsilon == eps / 4**6
    assert difference(before, results(model, inputs)) <= BAR
    fold(model, inverse=folding)
    assert model.config.layer_norm_epsilon == eps
    assert model.encoder.final_layer_norm.variance_epsilon == eps
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
