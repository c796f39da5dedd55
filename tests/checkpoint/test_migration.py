"""`migrate`: gains divided by scales, columns of their readers multiplied, and the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from folded_checkpoints import check, failed, flipped, folded, tensors, write_certificate
from folding_cases import BAR, FLAGS, TIES, difference, graph_of, results
from normkit.checkpoint import verify
from normkit.checkpoint.loading import load
from normkit.checkpoint.logits import true_logits
from normkit.checkpoint.memory import fold
from normkit.checkpoint.migration import asked_scales, scales_of_norms
from normkit.checkpoint.opening import open_model
from normkit.errors import InputError
from planned_models import model_of, plan_of
from tiny_models import tiny

NORM = "model.layers.0.input_layernorm"


def drawn(model: Any, seed: int = 0) -> dict[str, Tensor]:
    """Scales between 1/8 and 8 for every norm that linear maps read."""
    generator, graph, state = torch.Generator().manual_seed(seed), graph_of(model), model.state_dict()
    found = {}
    for norm in graph.norms:
        if readers := graph.readers(norm.gives):
            reader = state[readers[0].tied_to or readers[0].weight]
            size = state[norm.weight].numel() if norm.weight else reader.shape[readers[0].in_axis]
            found[norm.name] = torch.exp2(6 * torch.rand(size, generator=generator, dtype=torch.float64) - 3)
    return found


def migrated(family: str, *, powers_of_two: bool = False, **options: Any) -> float:
    """The largest difference after a fold in memory, and 0 where no norm has a gain."""
    model, inputs = tiny(family, **options)
    if all(norm.weight is None for norm in graph_of(model).norms):
        (refusal, *_) = plan_of(model, "migrate", scales=asked_scales(drawn(model))).refusals
        assert refusal.reason == "it has no gain that could be divided by scales"
        return 0.0
    before = results(model, inputs)
    done = fold(model, operations=["migrate"], scales=drawn(model), powers_of_two=powers_of_two, untie=True)
    assert done.plan.num_folded >= 1
    return difference(before, results(model, inputs))


@pytest.mark.slow
@pytest.mark.sampled(8)
@pytest.mark.parametrize(("family", "tied"), TIES)
def test_migrated_a_model_computes_the_same(family, tied):
    assert migrated(family, tied=tied, eps=1e-2) <= BAR


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("family", "flags"), FLAGS)
def test_so_it_does_with_other_tensors_and_powers_of_two(family, flags):
    assert migrated(family, powers_of_two=True, **flags) <= BAR


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mixtral"])
def test_on_disk_it_is_proved_and_a_bit_or_another_scale_is_named(family, powers_of_two, tmp_path):
    scales, dtype = tmp_path / "scales.safetensors", torch.bfloat16
    save_file(drawn(tiny(family)[0]), scales)
    asked = {"operations": ["migrate"], "scales": scales, "powers_of_two": powers_of_two}
    pair = folded(tmp_path, family, dtype, **asked)
    assert failed(verify(pair.source, pair.result, scales=scales)) == {}
    document = pair.certificate
    relation = "power" if powers_of_two else "product"
    assert {entry["relation"] for entry in document["tensors"].values()} == {"identical", relation}
    inputs = tiny(family)[1]
    if powers_of_two:
        assert check(verify(pair.source, pair.result, scales=scales), "figures").what.endswith("lost a bit")
        before, after = (load(folder, dtype="float64") for folder in (pair.source, pair.result))
        # Experts of a loaded model run in a product that knows no float64.
        assert float((true_logits(before, **inputs) - true_logits(after, **inputs)).abs().max()) <= BAR
    name, place = next(
        (name, place)
        for name, place in tensors(pair.result).items()
        if document["tensors"][name]["relation"] == relation
    )
    with flipped(place.file, place.start):
        assert failed(verify(pair.source, pair.result, scales=scales))[relation].startswith(f"{name}[0")
    # Another file of scales, named by the certificate or not.
    other = tmp_path / "other.safetensors"
    save_file(drawn(tiny(family)[0], seed=1), other)
    faults = failed(verify(pair.source, pair.result, scales=other))
    assert {"plan", relation} <= faults.keys()
    document["asked"]["options"]["scales"] = document["plan"]["options"]["scales"] = "0" * 64
    write_certificate(pair.result, document)
    assert failed(verify(pair.source, pair.result, scales=scales)).keys() == {"plan"}
    with pytest.raises(
        InputError, match=r"was folded with a file \(SHA-256 '000000000000'...\); give it with --scales"
    ):
        verify(pair.source, pair.result)


def test_the_product_of_gain_and_weight_is_rounded_once():
    """The weight takes what the rounding of the gain left, so that their product has one rounding, of the weight."""
    model = model_of("llama", dtype=torch.bfloat16)
    gain, query = (model.get_submodule(path) for path in (NORM, "model.layers.0.self_attn.q_proj"))
    exact = query.weight.double() * gain.weight.double()
    fold(model, operations=["migrate"], scales=drawn(model))
    now = query.weight.double() * gain.weight.double()
    assert ((now - exact).abs() <= 2.0**-8 * exact.abs()).all()
    assert not torch.equal(now, exact)


def test_alpha_balances_activations_and_weights_and_a_norm_of_heads_alone_is_left():
    model = model_of("llama")
    opened = open_model(model)
    largest = {f"{name}.max": values for name, values in drawn(model).items()}
    largest[f"{NORM}.max"][3] = 0.0
    scales = asked_scales({**largest, f"{NORM}.mean": largest[f"{NORM}.max"]}, alpha=0.25)
    found = scales_of_norms(scales, opened.graph, opened.source)
    assert list(found) == [norm.name for norm in opened.graph.norms if norm.name != "model.norm"]
    reads = [model.get_submodule(f"model.layers.0.self_attn.{name}_proj").weight for name in "qkv"]
    due = largest[f"{NORM}.max"] ** 0.25 / torch.cat(reads).abs().amax(0).detach() ** 0.75
    due[3] = 1.0
    assert torch.allclose(found[NORM], due, rtol=1e-15)
    # SmoothQuant's own files name linear maps, those that no norm feeds as well.
    by_maps = {f"model.layers.0.self_attn.{name}_proj": largest[f"{NORM}.max"] for name in "qk"}
    by_maps["model.layers.0.self_attn.o_proj"] = torch.ones(3)
    again = scales_of_norms(asked_scales(by_maps, alpha=0.25), opened.graph, opened.source)
    assert list(again) == [NORM]
    assert torch.equal(again[NORM], found[NORM])
    # Conv1D has its columns along the first axis.
    gpt2 = open_model(model_of("gpt2"))
    name = "transformer.h.0.ln_1"
    ones = asked_scales({name: torch.ones(gpt2.graph.width)}, alpha=0.0)
    weight = gpt2.source.rows("transformer.h.0.attn.c_attn.weight", 0, gpt2.graph.width)
    assert torch.allclose(scales_of_norms(ones, gpt2.graph, gpt2.source)[name], 1 / weight.abs().amax(1), rtol=1e-15)


def test_what_cannot_be_migrated_is_one_line(tmp_path: Path):
    model, ones = model_of("llama"), torch.ones(model_of("llama").config.hidden_size)
    for given, words in (
        ({"model.layers.9.norm": ones}, "'model.layers.9.norm' of the scales is no norm and no linear map"),
        ({f"{NORM}.max": ones}, "is a size that inspect --activations measured, and no scale; give --alpha 0.5"),
        ({NORM: ones[1:]}, "expected .* numbers for model.layers.0.input_layernorm in the scales, got"),
        ({"model.layers.0.self_attn.o_proj": ones}, "the scales hold nothing for a norm of LlamaForCausalLM"),
        ({f"{NORM[:-15]}self_attn.{name}_proj": ones * at for at, name in enumerate("qk", 1)}, "has others than"),
        ({NORM: -ones}, "of the scales holds -1; expected are positive numbers"),
        ({NORM: ones * torch.inf}, "of the scales holds NaN or infinity"),
        ({NORM: ones.int()}, "expected a vector of F64, F32, F16, BF16 in .* of the scales, got I32"),
        (tmp_path / "none", "nothing is there"),
    ):
        with pytest.raises(InputError, match=words):
            fold(model, operations=["migrate"], scales=given)
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(InputError, match="expected a safetensors file of scales"):
        asked_scales(tmp_path / "text")
    with pytest.raises(InputError, match="alpha is a number from 0 to 1, got 2"):
        asked_scales({}, alpha=2)
    with pytest.raises(InputError, match="alpha and powers_of_two are for migrate"):
        asked_scales(None, alpha=0.5)
    with pytest.raises(InputError, match="migrate takes scales, got none"):
        plan_of(model, "migrate")
    with pytest.raises(InputError, match="migrate and exponent change the same gains"):
        plan_of(model, "migrate", "exponent", scales=asked_scales({NORM: 2 * ones}))
    refusal = plan_of(model_of("llama", tied=True), "migrate", scales=asked_scales({"model.norm": 2 * ones})).refusals
    assert "--untie gives the head a table of its own" in refusal[0].reason
    narrow = model_of("gemma", dtype=torch.bfloat16)
    plan = plan_of(narrow, "migrate", scales=asked_scales({NORM: 2.0**9 * ones}, powers_of_two=True))
    assert "gains stay whole, as BF16 would lose a bit of what remains" in plan.remarks[0]


def test_in_memory_it_is_undone():
    model, inputs = tiny("gemma2")
    before = results(model, inputs)
    folding = fold(model, operations=["migrate"], scales=drawn(model), powers_of_two=True)
    fold(model, inverse=folding)
    assert difference(before, results(model, inputs)) <= BAR
