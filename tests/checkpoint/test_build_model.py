"""What transformers builds from a configuration and weights, and what of them did not fit.

Recorded norms are put back, or refused in one line: a record comes out of a file that anyone may have written.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import normkit as nk
from normkit.checkpoint.build_model import KEY, Reload, build_model, record, recorded, reload_check, replay
from normkit.checkpoint.loading import load_model
from normkit.checkpoint.logits import true_logits
from normkit.checkpoint.opening import read_config
from normkit.errors import ModelError
from normkit.spec import NormSpec
from tiny_models import RECIPES, norms, tiny


def is_whole(found: Reload) -> bool:
    """It ran, and every weight found its place."""
    return found.ran and not (found.missing or found.unexpected or found.mismatched)


def test_what_does_not_fit_is_told_and_the_rest_is_loaded(tmp_path: Path) -> None:
    model, _ = tiny("bert", tied=False)
    model.save_pretrained(tmp_path)
    weights = dict(model.state_dict())
    del weights["bert.embeddings.LayerNorm.bias"]
    weights["cls.predictions.bias"] = torch.zeros(5)
    found = build_model(read_config(tmp_path), {**weights, "surplus": torch.zeros(2)}, tmp_path)
    assert found.asked == type(found.model).__name__ == "BertForMaskedLM"
    assert not found.model.training
    assert found.missing == ["bert.embeddings.LayerNorm.bias"]
    assert found.unexpected == ["surplus"]
    assert found.mismatched == [("cls.predictions.bias", (5,), (97,))]
    kept = found.model.bert.embeddings.LayerNorm.weight
    assert torch.equal(kept, model.bert.embeddings.LayerNorm.weight)


@pytest.mark.slow
def test_the_body_is_taken_where_only_the_head_is_missing(tmp_path: Path) -> None:
    model, _ = tiny("bert", tied=False)
    model.save_pretrained(tmp_path)
    weights = {name: value for name, value in model.state_dict().items() if name.startswith("bert.")}
    found = build_model(read_config(tmp_path), weights, tmp_path)
    assert (found.asked, type(found.model).__name__) == ("BertForMaskedLM", "BertModel")
    strict = build_model(read_config(tmp_path), weights, tmp_path, or_body=False)
    assert type(strict.model).__name__ == "BertForMaskedLM"
    assert all(name.startswith("cls.") for name in strict.missing)
    del weights["bert.embeddings.LayerNorm.bias"]
    assert type(build_model(read_config(tmp_path), weights, tmp_path).model).__name__ == "BertForMaskedLM"


def test_only_a_reader_of_text_where_one_is_wanted(tmp_path: Path) -> None:
    model, _ = tiny("vit")
    model.save_pretrained(tmp_path)
    weights = model.state_dict()
    assert build_model(read_config(tmp_path), weights, tmp_path).missing == []
    with pytest.raises(ModelError, match="this command runs models that read text"):
        build_model(read_config(tmp_path), weights, tmp_path, text_only=True)


WEIGHTS = "model.safetensors"


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", RECIPES)
def test_what_transformers_saved_it_loads_whole(tmp_path: Path, family: str) -> None:
    model, _ = tiny(family, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert reload_check(tmp_path) == Reload(class_name=type(model).__name__)


def test_names_that_do_not_fit_are_told(gpt2: Path) -> None:
    weights = load_file(gpt2 / WEIGHTS)
    del weights["transformer.h.0.mlp.c_fc.weight"]
    weights["transformer.h.1.ln_1.bias"] = torch.zeros(17)
    save_file({**weights, "surplus": torch.zeros(3)}, gpt2 / WEIGHTS)
    found = reload_check(gpt2)
    assert (found.class_name, found.ran, found.reason) == ("GPT2LMHeadModel", True, "")
    assert found.unexpected == ("surplus",)
    assert found.mismatched == ("transformer.h.1.ln_1.bias",)
    assert "transformer.h.0.mlp.c_fc.weight" in found.missing
    assert not is_whole(found)


def test_a_bias_not_asked_for_is_unexpected_and_a_head_without_weights_missing(tmp_path: Path, edit: Any) -> None:
    tiny("llama_bias")[0].save_pretrained(tmp_path)
    edit(tmp_path / "config.json", attention_bias=False)
    assert set(reload_check(tmp_path).unexpected) == {
        f"model.layers.{layer}.self_attn.{name}_proj.bias" for layer in (0, 1) for name in ("q", "k", "v", "o")
    }
    tiny("gpt2", tied=True)[0].save_pretrained(tmp_path)
    assert is_whole(reload_check(tmp_path))
    edit(tmp_path / "config.json", tie_word_embeddings=False)
    found = reload_check(tmp_path)
    assert (found.missing, found.class_name) == (("lm_head.weight",), "GPT2LMHeadModel")
    tiny("bert")[0].bert.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", architectures=["BertForMaskedLM"])
    found = reload_check(tmp_path)
    assert found.class_name == "BertForMaskedLM"
    assert "cls.predictions.transform.dense.weight" in found.missing


def test_no_weight_is_read_or_allocated_whatever_a_header_claims(gpt2: Path) -> None:
    # The numbers are gone from the disk: only a file that pretends to be as long.
    with (gpt2 / WEIGHTS).open("r+b") as file:
        length = struct.unpack("<Q", file.read(8))[0] + 8
        size = file.seek(0, 2)
        file.truncate(length)
        file.truncate(size)
    assert (gpt2 / WEIGHTS).stat().st_size == size
    assert is_whole(reload_check(gpt2))
    # A terabyte of zeros that no disk holds.
    rows = 2**34
    header = json.dumps({"a": {"dtype": "F32", "shape": [rows, 16], "data_offsets": [0, rows * 64]}}).encode()
    header += b" " * (-len(header) % 8)
    with (gpt2 / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(len(header) + 8 + rows * 64)
    assert reload_check(gpt2).unexpected == ("a",)


def test_recorded_norms_are_put_in_place(tmp_path: Path) -> None:
    model, _ = tiny("olmo")
    spec = NormSpec(centre_numerator=False, centre_statistics=False, has_weight=False, has_bias=False)
    model.config.update({KEY: record(dict.fromkeys(norms(model), spec))})
    model.save_pretrained(tmp_path)
    assert is_whole(reload_check(tmp_path))
    model.config.update({KEY: record({"model.norm": spec.replace(has_weight=True)})})
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"expected weight in 'model\.norm'"):
        reload_check(tmp_path)


def test_a_model_that_cannot_be_built_and_no_accelerate_are_one_line(
    gpt2: Path, edit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(gpt2 / "config.json", n_head=3)
    with pytest.raises(ModelError, match="transformers cannot build GPT2LMHeadModel from "):
        reload_check(gpt2)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    found = reload_check(gpt2)
    assert found == Reload(class_name="GPT2LMHeadModel", ran=False, reason="accelerate is not installed")
    assert not is_whole(found)


LAYER = NormSpec()
RMS = NormSpec(centre_numerator=False, centre_statistics=False)
NORM = "transformer.h.1.ln_2"


def centred(model: Any) -> Any:
    """A GPT-2 in place, so that whatever enters its residual stream has no mean; its tables are not shared."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("wte.weight", "wpe.weight")) or "c_proj" in name:
                parameter -= parameter.mean(-1, keepdim=True)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("eps", [1e-6, 1e-2, 10.0])
def test_a_centred_model_computes_the_same_with_rms_norms(tmp_path: Path, eps: float) -> None:
    model, inputs = tiny("gpt2", tied=False, eps=eps)
    expected = true_logits(model, **inputs)
    paths = list(norms(model))
    centred(model).config.update({KEY: record(dict.fromkeys(paths, RMS.replace(eps=eps)))})
    model.save_pretrained(tmp_path)
    loaded = nk.load(tmp_path)
    assert (true_logits(loaded, **inputs) - expected).abs().max() < 1e-12
    for path in paths:
        found = nk.identify(loaded.get_submodule(path), (4, 32)).spec
        assert found is not None
        assert (found.centre_numerator, found.centre_statistics, found.has_bias) == (False, False, True)


@pytest.mark.slow
def test_a_verb_sees_the_norms_that_are_recorded(tmp_path: Path) -> None:
    model, _ = tiny("gpt2", tied=False, dtype=torch.float32)
    centred(model).config.update({KEY: record(dict.fromkeys(norms(model), RMS))})
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.notes == ()
    inspection = nk.inspect(loaded.model, [{"input_ids": torch.randint(3, 97, (2, 24))}])
    assert len(inspection.sites) == 5
    assert not any(site.spec.centre_statistics for site in inspection.sites)


def test_saved_again_it_is_the_same_model_again(tmp_path: Path) -> None:
    model, inputs = tiny("gpt2", tied=False)
    model.config.update({KEY: record({NORM: RMS})})
    model.save_pretrained(tmp_path / "first")
    first = nk.load(tmp_path / "first")
    first.save_pretrained(tmp_path / "second")
    second = nk.load(tmp_path / "second")
    assert type(second.get_submodule(NORM)) is nk.Norm
    assert first.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(true_logits(second, **inputs), true_logits(first, **inputs))
    assert not torch.equal(true_logits(first, **inputs), true_logits(model, **inputs))


@pytest.mark.parametrize("mode", [True, False])
def test_parameters_and_mode_are_the_same_ones(mode: bool) -> None:
    model, _ = tiny("gpt2")
    model.train(mode)
    before = model.get_submodule(NORM)
    replay(model, {NORM: RMS}, "here")
    after = model.get_submodule(NORM)
    assert (after.weight is before.weight, after.bias is before.bias) == (True, True)
    assert after.training == mode
    assert type(model.get_submodule("transformer.h.0.ln_2")) is nn.LayerNorm


def test_a_norm_without_parameters_takes_the_shape_that_it_names() -> None:
    model, inputs = tiny("olmo")
    spec = NormSpec(has_weight=False, has_bias=False)
    expected = true_logits(model, **inputs)
    replay(model, dict.fromkeys(norms(model), spec), "here")
    assert model.model.norm.normalized_shape == (32,)
    assert (true_logits(model, **inputs) - expected).abs().max() < 1e-13


def test_what_is_recorded_is_read_back() -> None:
    specs = {"a": RMS, "b.c": LAYER.replace(eps=None, has_bias=False)}
    values = json.loads(json.dumps({KEY: record(specs), "model_type": "gpt2"}))
    assert recorded(values, "config.json") == specs
    assert recorded({}, "config.json") == {}


def good(**spec: Any) -> dict[str, Any]:
    return {"schema_version": 1, "norms": {NORM: {**LAYER.to_json(), **spec}}}


def at(path: str) -> dict[str, Any]:
    return {"schema_version": 1, "norms": {path: LAYER.to_json()}}


HOSTILE = {
    "no object": (None, "expected the norms that were replaced"),
    "a list": ([], "expected the norms that were replaced"),
    "a text": ("import os", "expected the norms that were replaced"),
    "no norms": ({"schema_version": 1}, "expected the norms that were replaced"),
    "a list of norms": ({"schema_version": 1, "norms": [NORM]}, "expected the norms that were replaced"),
    "no version": ({"norms": {}}, "expected schema_version 1 .*, found None"),
    "another version": ({"schema_version": 2, "norms": {}}, "expected schema_version 1 .*, found 2"),
    "a text as version": ({"schema_version": "1\n" * 500, "norms": {}}, "expected schema_version 1 .*, found '1"),
    "unknown key": (at(NORM) | {"auto_map": {"AutoModel": "a.B"}}, "expected only norms .*, found 'auto_map' too"),
    "no spec": ({"schema_version": 1, "norms": {NORM: None}}, "expected the spec of 'transformer.*, found None"),
    "an empty list as spec": ({"schema_version": 1, "norms": {NORM: []}}, "found \\[\\]"),
    "a class as spec": ({"schema_version": 1, "norms": {NORM: "torch.nn.Linear"}}, "found 'torch.nn.Linear'"),
    "unknown convention": (good(code="x"), "a NormSpec has no 'code'"),
    "many unknown conventions": (good(**{"x" * 5000: 1, "a\nb": 2}), "a NormSpec has no 'a"),
    "unknown value": (good(cast="eval"), "cast must be one of"),
    "an object as value": (good(eps_placement={"a": [1]}), "eps_placement must be one of"),
    "no number as eps": (good(eps="1e-5"), "eps must be a finite number"),
    "endless eps": (good(eps=1e999), "eps must be a finite number"),
    "eps beyond floats": (good(eps=10**400), "it holds an integer of 401 digits"),
    "odd axes": (good(axes=[[-1]]), "axes must be"),
    "axes that do not fit": (good(axes=[-2, -1]), "its shape \\(32,\\) does not"),
    "groups that do not fit": (good(groups=5), "its shape \\(32,\\) does not"),
    "endless groups": (good(groups=10**400), "it holds an integer of 401 digits"),
    "no gain": (good(has_weight=False), "expected bias in .* found weight and bias"),
    "no bias": (good(has_bias=False), "expected weight in .* found weight and bias"),
    "neither": (good(has_weight=False, has_bias=False), "expected no parameters in .* found weight and bias"),
    "the model itself": (at(""), "expected a norm at ''.* found GPT2LMHeadModel"),
    "a block": (at("transformer.h.1"), "expected a norm .* found GPT2Block"),
    "a linear map": (at("transformer.h.1.mlp.c_fc"), "expected a norm .* found Conv1D"),
    "a table": (at("transformer.wte"), "expected a norm .* found Embedding"),
    "a parameter": (at(f"{NORM}.weight"), "it has no such module"),
    "an attribute": (at(f"{NORM}.__class__"), "it has no such module"),
    "a method": (at("save_pretrained"), "it has no such module"),
    "nothing": (at("transformer.h.9.ln_1"), "it has no such module"),
    "half a character in a path": (at("../\ud800\x1b[2J\n" * 100), "it holds half a character"),
    "an odd path": (at("../\x1b[2J\n" * 100), "it has no such module"),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("opened", [nk.load, lambda path: load_model(str(path))], ids=["load", "load_model"])
def test_a_record_that_does_not_fit_is_one_line(saved: Path, name: str, opened: Any) -> None:
    given, message = HOSTILE[name]
    values = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**values, KEY: given}))
    with pytest.raises(ModelError, match=message) as caught:
        opened(saved)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    assert "config.json" in str(caught.value)


NAMES = st.sampled_from([*RMS.to_json(), *record({}), NORM, "", "\ud800"])
VALUES = st.sampled_from([None, True, 0, 1, -(10**400), 1e-5, 1e999, "late", "x\n", [], [-1], {}, {"a": []}])


@pytest.mark.slow
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_whatever_is_recorded_is_a_spec_or_one_line(values: dict[str, Any]) -> None:
    for found in (values, {"schema_version": 1, "norms": values}, {"schema_version": 1, "norms": {NORM: values}}):
        outcome: Any = None
        try:
            outcome = recorded({KEY: found}, "config.json")
        except ModelError as error:
            outcome = str(error)
        assert outcome.isprintable() if isinstance(outcome, str) else all(map(NormSpec.to_json, outcome.values()))
        assert len(outcome) < 600


@pytest.fixture
def saved(gpt2: Path) -> Path:
    """The tiny GPT-2 with 32 features, so that records of all tests speak of one width."""
    model, _ = tiny("gpt2", dtype=torch.float32)
    model.save_pretrained(gpt2)
    return gpt2


def test_nothing_is_replaced_where_one_norm_does_not_fit() -> None:
    model, _ = tiny("gpt2")
    with pytest.raises(ModelError):
        replay(model, {NORM: RMS, "transformer.h.9.ln_1": RMS}, "here")
    assert type(model.get_submodule(NORM)) is nn.LayerNorm


class ScaleNorm(nn.Module):
    """A norm whose gain has another name."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    "module",
    [ScaleNorm(), nn.BatchNorm1d(4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.LocalResponseNorm(2)],
)
def test_norms_of_other_kinds_are_refused(module: nn.Module) -> None:
    model = nn.ModuleDict({"a": module})
    with pytest.raises(ModelError, match="expected a norm at 'a'"):
        replay(model, {"a": LAYER}, "here")
