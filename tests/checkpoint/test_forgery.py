"""Certificates edited to agree with what was tampered with: `verify` derives all of it again and is not misled."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from folded_checkpoints import (
    ENGLISH,
    Pair,
    check,
    failed,
    flip,
    folded,
    forge,
    reworded,
    tensors,
    without_english,
    write_certificate,
)
from normkit.checkpoint import verify
from normkit.checkpoint.model_folder import CERTIFICATE, INDEX

pytestmark = pytest.mark.slow

ALL = ("gain", "bias", "final", "centre", "rms", "value")

# A tensor of each relation.
TAMPERED = {
    "identical": "transformer.wte.weight",
    "product": "transformer.h.0.attn.c_attn.weight",
    "sum": "transformer.h.0.attn.c_attn.bias",
    "constant": "transformer.h.0.ln_1.weight",
}


@pytest.mark.parametrize(("relation", "name"), list(TAMPERED.items()))
def test_forged_weights_fail_by_algebra(pair, relation, name):
    place = tensors(pair.result)[name]
    flip(place.file, place.start + 4, 0)
    forge(pair)
    faults = failed(verify(pair.source, pair.result))
    assert faults.keys() == {relation}
    assert faults[relation].startswith(f"{name}[")
    assert "follows from the source" in faults[relation]


def test_forged_weights_fail_by_algebra_where_a_sum_is_of_16_bits(centred, tmp_path):
    pair = centred.copy(tmp_path)
    place = tensors(pair.result)["transformer.wpe.weight"]
    flip(place.file, place.start + 2, 0)
    forge(pair)
    assert failed(verify(pair.source, pair.result)).keys() == {"sum"}


def test_a_forged_source_fails_by_algebra(pair):
    place = tensors(pair.source)["transformer.h.0.attn.c_attn.weight"]
    flip(place.file, place.stop - 1, 0)
    forge(pair)
    faults = failed(verify(pair.source, pair.result))
    # The bias that was folded went through this matrix.
    assert faults.keys() >= {"product", "sum"}
    assert "transformer.h.0.attn.c_attn.weight[" in faults["product"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("operation", "options"),
    [
        ("exponent", {}),
        ("scale", {"halvings": 2}),
        ("rotate", {"seed": 3, "untie": True}),
        ("migrate", {"scales": {"model.layers.0.input_layernorm": torch.full((32,), 3.0)}}),
    ],
)
def test_a_fold_that_computes_the_same_and_does_not_follow_fails_for_each_operation(tmp_path, operation, options):
    pair = folded(tmp_path, "llama", operations=[operation], **options)
    given = {key: value for key, value in options.items() if key == "scales"}
    place = tensors(pair.result)
    first, second = (place[f"model.layers.{block}.self_attn.q_proj.weight"] for block in (0, 1))
    whole = first.file.read_bytes(), second.file.read_bytes()
    swapped = [file[each.start : each.stop] for file, each in zip(whole, (first, second), strict=True)][::-1]
    for each, content in zip((first, second), swapped, strict=True):
        with each.file.open("r+b") as file:
            file.seek(each.start)
            file.write(content)
    forge(pair)
    assert "model.layers.0.self_attn.q_proj.weight[" in str(failed(verify(pair.source, pair.result, **given)))
    for each, content in zip((first, second), whole, strict=True):
        each.file.write_bytes(content)
    # One gain twice as large, and what reads it half as large.
    for file in sorted(pair.result.glob("*.safetensors")):
        weights = load_file(file)
        for name, value in weights.items():
            if name.startswith("model.layers.0."):
                value *= 2.0 if "input_layernorm" in name else 0.5 if re.search("[qkv]_proj", name) else 1.0
        save_file(weights, file, {"format": "pt"})
    config = json.loads((pair.result / "config.json").read_text())
    config["rms_norm_eps"] *= 1 + 2**-50
    (pair.result / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    forge(pair)
    faults = failed(verify(pair.source, pair.result, **given))
    assert "rms_norm_eps" in faults.pop("config.json")
    assert "model.layers.0.self_attn.q_proj.weight[" in str(faults)


def test_many_forged_elements_are_counted(pair):
    place = tensors(pair.result)["lm_head.weight"]
    weight = load_file(place.file)["lm_head.weight"]
    with place.file.open("r+b") as file:
        file.seek(place.start)
        file.write((2 * weight).numpy().tobytes())
    forge(pair)
    # Twice zero is zero: the column of the gain that is zero agrees.
    count = int((weight != 0).sum())
    assert failed(verify(pair.source, pair.result))["product"].endswith(f"(and {count - 1:,} more of its elements)")


def test_a_negative_zero_is_another_bit(pair):
    name = "transformer.h.0.ln_1.bias"
    place = tensors(pair.result)[name]
    flip(place.file, place.start + 3, 7)
    forge(pair)
    assert failed(verify(pair.source, pair.result)) == {"constant": f"{name}[0] is -0.0, 0.0 follows from the source"}


def save_with(pair: Pair, text: str = "pt", **changes: torch.Tensor | None) -> str:
    """Change tensors of the first file of a result, or the text beside them; its name."""
    file = sorted(pair.result.glob("*.safetensors"))[0]
    weights = {**load_file(file), **changes}
    save_file({name: value for name, value in weights.items() if value is not None}, file, {"format": text})
    return file.name


def test_a_forged_header_is_named(pair):
    first = next(iter(load_file(sorted(pair.result.glob("*.safetensors"))[0])))
    name = save_with(pair, stranger=torch.zeros(3))
    forge(pair)
    assert failed(verify(pair.source, pair.result))["headers"].startswith(f"{name} holds 'stranger'")
    save_with(pair, stranger=None, **{first: None})
    forge(pair)
    assert failed(verify(pair.source, pair.result))["headers"] == f"{name} lacks {first}"


def test_forged_texts_in_a_header_are_named(pair):
    name = save_with(pair, text="np")
    forge(pair)
    assert failed(verify(pair.source, pair.result)).keys() == {"headers"}
    assert name in failed(verify(pair.source, pair.result))["headers"]


def test_a_forged_dtype_is_named(pair):
    file = sorted(pair.result.glob("*.safetensors"))[0]
    name, value = next(iter(load_file(file).items()))
    save_with(pair, **{name: value.double()})
    forge(pair)
    assert f"{name} in {file.name} is F64, F32 follows" in failed(verify(pair.source, pair.result))["headers"]


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"n_head": 4', '"n_head": 8', ['"n_head": 8', '"n_head": 4']),
        ('"n_layer": 2', '"n_layer": 1000000000000', ["1000000000000"]),
        ("{", '{\n  "n_head": 8,', []),
    ],
)
def test_a_forged_configuration_is_named_and_its_model_is_never_built(pair, old, new, named):
    text = (pair.result / "config.json").read_text()
    (pair.result / "config.json").write_text(text.replace(old, new, 1))
    forge(pair)
    found = verify(pair.source, pair.result)
    assert failed(found).keys() == {"config.json"}
    assert all(words in failed(found)["config.json"] for words in named)
    assert check(found, "reload").passed is None


def test_a_forged_index_is_named(pair):
    values = json.loads((pair.result / INDEX).read_text())
    values["metadata"]["total_size"] += 1
    (pair.result / INDEX).write_text(json.dumps(values, indent=2) + "\n")
    forge(pair)
    assert "total_size" in failed(verify(pair.source, pair.result))["index"]


def test_a_forged_tokenizer_is_named(pair):
    flip(pair.result / "tokenizer_config.json", 5)
    forge(pair)
    assert failed(verify(pair.source, pair.result)) == {
        "carried files": "tokenizer_config.json differs from the source's"
    }


def test_a_file_that_does_not_follow_is_named_though_the_certificate_names_it(pair):
    save_file({"transformer.wte.weight": torch.zeros(3)}, pair.result / "adapter_model.safetensors")
    (pair.result / "modeling.py").write_text("raise SystemExit")
    faults = failed(verify(pair.source, pair.result))
    assert "'adapter_model.safetensors' is not in the certificate (and 1 more)" in faults["result files"]
    forge(pair)
    assert failed(verify(pair.source, pair.result)) == {
        "file names": "adapter_model.safetensors does not follow from the source (and 1 more)"
    }


def test_a_carried_file_that_is_gone_is_missed_though_the_certificate_forgot_it(pair):
    (pair.result / "tokenizer.json").unlink()
    forge(pair)
    assert failed(verify(pair.source, pair.result)) == {"file names": "tokenizer.json is missing"}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("path", "value", "name", "said"),
    [
        (("plan", "norms", 0, "gain"), "left", "plan", "plan.norms.0.gain is recorded as 'left', 'folded' follows"),
        (("plan", "refusals"), [{"operation": "gain", "place": "x", "reason": "y"}], "plan", "plan.refusals"),
        (("asked", "operations"), ["bias", "gain", "final"], "plan", "operations.0 is recorded as 'bias'"),
        (("asked", "operations"), ["gain"], "plan", "operations"),
        (("asked", "untie"), False, "plan", None),
        (("source", "architecture"), "LlamaForCausalLM", "plan", "architecture is recorded as 'LlamaForCausalLM'"),
        (("result", "architecture"), "LlamaForCausalLM", "plan", "becomes is recorded as 'LlamaForCausalLM'"),
        (("tensors", "lm_head.weight", "relation"), "identical", "plan", "tensors.lm_head.weight.relation"),
        (("tensors", "transformer.h.0.mlp.c_fc.bias", "residual"), 0.0, "figures", "c_fc.bias is recorded as 0.0"),
        (("smallest_divisor", "size"), 1.0, "figures", "smallest_divisor.size is recorded as 1.0"),
        (("smallest_divisor",), None, "figures", "smallest_divisor is recorded as None"),
        (("reload", "class_name"), "LlamaForCausalLM", "reload", "reload.class_name is recorded as 'LlamaForCausalLM'"),
        (("reload", "missing"), ["x"], "reload", "reload.missing"),
        (("note",), "believe me", "certificate", f"{CERTIFICATE} is not written as normkit writes it"),
    ],
)
def test_what_the_certificate_says_is_derived_again(pair, path, value, name, said):
    document = pair.certificate
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    if inner.get(path[-1]) == value if isinstance(inner, dict) else inner[path[-1]] == value:
        inner[path[-1]] = "something else"
    else:
        inner[path[-1]] = value
    write_certificate(pair.result, document)
    faults = failed(verify(pair.source, pair.result))
    assert name in faults
    assert said is None or said in faults[name]


def test_a_certificate_of_other_words_still_holds(centred, tmp_path):
    """As a later version, or an earlier one, words them."""
    pair = centred.copy(tmp_path)
    document, found = without_english(pair.certificate), json.dumps(pair.certificate)
    assert all(f'"{key}"' in found and f'"{key}"' not in json.dumps(document) for key in ENGLISH)
    document = reworded(pair.certificate)
    write_certificate(pair.result, document)
    assert failed(verify(pair.source, pair.result)) == {}
    del document["does_not_prove"]
    write_certificate(pair.result, document)
    assert failed(verify(pair.source, pair.result)) == {}


def test_another_dtype_than_was_asked_for_is_named(centred, tmp_path):
    pair = centred.copy(tmp_path)
    document = pair.certificate
    document["asked"]["dtype"] = "float32"
    write_certificate(pair.result, document)
    faults = failed(verify(pair.source, pair.result))
    assert "is BF16, F32 follows from the source" in faults["headers"]
    assert "plan.config.dtype' is not recorded" in faults["plan"]


def test_another_version_is_named_where_the_plan_differs(pair):
    document = pair.certificate
    document["normkit"] = "9.9"
    write_certificate(pair.result, document)
    assert failed(verify(pair.source, pair.result)) == {}
    document["plan"]["family"] = "llama"
    write_certificate(pair.result, document)
    assert "made by normkit '9.9'" in failed(verify(pair.source, pair.result))["plan"]
