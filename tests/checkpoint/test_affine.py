"""`exponent`: the powers of two leave the gains, and no number loses a bit."""

from __future__ import annotations

import pytest
import torch

from folded_checkpoints import check, failed, flipped, folded, tensors
from folding_cases import BAR, difference, reasons, results
from normkit.checkpoint import fold, verify
from normkit.checkpoint.affine import expected_rounding
from normkit.checkpoint.loading import load
from normkit.checkpoint.logits import true_logits
from normkit.checkpoint.matrices import factors
from normkit.checkpoint.memory import fold as fold_model
from normkit.checkpoint.opening import open_model
from normkit.checkpoint.plan import Gain
from normkit.errors import InputError
from normkit.measurement.texts import from_random_ids
from planned_models import edits_of, model_of, plan_of
from tiny_models import tiny


def test_the_power_of_two_leaves_a_mantissa_around_one():
    gains = torch.tensor([0.0, 1.0, -1.0, 1.41, 1.42, 0.71, 0.7, -6.0, 2.0**-100], dtype=torch.float64)
    powers = factors(Gain(weight="g", is_power=True), gains)
    assert powers.tolist() == [1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 0.5, 8.0, 2.0**-100]
    assert factors(Gain(weight="g", is_power=True, offset=1.0, kept=(1,)), gains)[:2].tolist() == [1.0, 1.0]
    drawn = torch.randn(1000, dtype=torch.float64)
    mantissas = (drawn / factors(Gain(weight="g", is_power=True), drawn)).abs()
    assert 0.5**0.5 <= float(mantissas.min()) <= float(mantissas.max()) < 2**0.5


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "whisper", "t5"])
def test_in_16_bits_nothing_is_rounded(family, tmp_path):
    pair = folded(tmp_path, family, torch.bfloat16, operations=["exponent"], untie=True)
    found = verify(pair.source, pair.result)
    assert failed(found) == {}
    assert check(found, "figures").what == "no sum was rounded, no power of two lost a bit"
    entries = pair.certificate["tensors"].values()
    assert {entry["relation"] for entry in entries} == {"identical", "power"}
    assert {entry["residual"] for entry in entries if entry["relation"] == "power"} == {0.0}
    inputs = tiny(family)[1]
    before, after = (load(folder, dtype="float64") for folder in (pair.source, pair.result))
    assert difference(results(before, inputs), results(after, inputs)) <= BAR


def test_one_plus_weight_stays_whole_where_a_bit_would_be_lost():
    model = model_of("gemma", dtype=torch.bfloat16)
    place = "model.layers.0.input_layernorm"
    with torch.no_grad():
        # 1 + 0.4238 = 2 (1 - 0.2881), and 0.2881 needs nine bits; 1 + 0.4219 = 2 (1 - 0.2891) needs seven.
        model.get_submodule(place).weight[:2] = torch.tensor([0.423828125, 0.421875])
    plan = plan_of(model, "exponent")
    change = next(norm for norm in plan.norms if norm.name == place)
    assert change.gain == "mantissa"
    assert 0 in change.kept
    assert 1 not in change.kept
    assert plan.remarks[-1].endswith("gains stay whole, as BF16 would lose a bit of what remains")
    fold_model(model, operations=["exponent"])
    assert model.get_submodule(place).weight[:2].tolist() == [0.423828125, 1.421875 / 2 - 1]


def test_gains_near_one_are_no_edit_and_a_shared_head_and_a_post_norm_are_refused():
    model = model_of("llama", tied=True)
    with torch.no_grad():
        model.get_submodule("model.layers.0.input_layernorm").weight.uniform_(0.8, 1.2)
    plan = plan_of(model, "exponent")
    assert plan.norms[0].gain == "identity"
    assert edits_of(plan)["model.layers.0.self_attn.q_proj.weight"].relation == "identical"
    assert "--untie gives the head a table" in reasons(plan, "exponent")["model.norm"]
    post_norm = reasons(plan_of(model_of("gemma2"), "exponent"), "exponent")
    assert "its output is added to the residual" in post_norm["model.layers.0.post_attention_layernorm"]
    with pytest.raises(InputError, match="exponent leaves the mantissas that gain would fold"):
        plan_of(model, "exponent", "gain")


@pytest.mark.slow
def test_bits_that_underflow_takes_are_counted_and_a_flipped_one_is_named(tmp_path):
    model, _ = tiny("llama", dtype=torch.float16)
    norm, reader = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"
    state = model.state_dict()
    with torch.no_grad():
        state[norm][0], state[reader][0, 0] = 0.25, 3 * 2.0**-24
    model.save_pretrained(tmp_path / "source")
    certificate = fold(tmp_path / "source", tmp_path / "folded", operations=["exponent"])
    # A quarter of three times the smallest number of float16 is rounded to one time: off by a quarter of it.
    lost = certificate.tensors[reader]["residual"] * float(load(tmp_path / "folded").state_dict()[reader].abs().max())
    assert lost == pytest.approx(2.0**-26, rel=1e-6)
    found = verify(tmp_path / "source", tmp_path / "folded")
    assert failed(found) == {}
    assert check(found, "figures").what.endswith("lost bits to underflow")
    place = tensors(tmp_path / "folded")[reader]
    with flipped(place.file, place.start):
        faults = failed(verify(tmp_path / "source", tmp_path / "folded"))
    assert faults["power"].startswith(f"{reader}[0, 0] is ")


def test_in_memory_it_is_undone_bit_for_bit():
    model, inputs = tiny("gpt2", tied=False)
    before, state = results(model, inputs), {name: value.clone() for name, value in model.state_dict().items()}
    folding = fold_model(model, operations=["exponent"])
    assert difference(before, results(model, inputs)) <= BAR
    fold_model(model, inverse=folding)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_rounding_of_folded_gains_is_foretold(dtype):
    model, _ = tiny("llama", dtype=dtype)
    plan, source = plan_of(model, "gain"), open_model(model).source
    expected, count = expected_rounding(plan.edits, source)
    before = {name: value.double() for name, value in model.state_dict().items()}
    fold_model(model, operations=["gain"])
    lost = total = 0.0
    for edit in plan.edits:
        if edit.relation == "product":
            exact = before[edit.name] * before[edit.gain.weight]
            lost += float((model.state_dict()[edit.name].double() - exact).square().sum())
            total += float(exact.square().sum())
    # All matrices of so small a model are read.
    assert count == sum(before[edit.name].numel() for edit in plan.edits if edit.relation == "product")
    assert expected == pytest.approx((lost / total) ** 0.5, rel=1e-6)
    assert expected_rounding(plan_of(model, "exponent").edits, source)[0] == 0.0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_trained_models_in_bfloat16_compute_the_same_to_the_last_bit(name, real_models, tmp_path):
    fold(real_models / name, tmp_path / "folded", operations=["exponent"], untie=True, threads=2)
    assert failed(verify(real_models / name, tmp_path / "folded", threads=2)) == {}
    batch = from_random_ids(load(real_models / name), length=32, max_tokens=64, batch_size=2).batches[0]
    logits = [
        true_logits(load(folder, dtype="float64"), **batch) for folder in (real_models / name, tmp_path / "folded")
    ]
    assert torch.equal(*logits)
