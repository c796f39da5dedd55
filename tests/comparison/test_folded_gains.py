"""Gains that are in the readers of their norms."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import normkit as nk
from normkit import demo
from normkit.checkpoint import fold
from normkit.checkpoint.model_folder import CERTIFICATE
from normkit.comparison.report import describe_comparison
from normkit.comparison.value_groups import TensorValue
from normkit.comparison.values import compare_values
from normkit.comparison.weights import weights_of
from tiny_models import tiny

FOLDER = demo.directory("rmsnorm")
GAIN = "model.layers.0.input_layernorm.weight"
READERS = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]


def tensors() -> dict[str, Tensor]:
    source = weights_of(FOLDER).source
    return {name: source.rows(name, 0, info.matrix[0]).reshape(info.shape) for name, info in source.tensors.items()}


def value(port: dict[str, Tensor], *, is_declared: bool = True) -> TensorValue:
    reference = weights_of(FOLDER)
    if not is_declared:
        reference = replace(reference, settings={})
    ours = replace(weights_of(port), runtime="transformers", architecture="llama")
    return next(each for each in compare_values(ours, reference).tensors if each.name == GAIN)


def folded(dtype: torch.dtype = torch.float32, *, but: str = "", order: bool = False) -> dict[str, Tensor]:
    found = tensors()
    gain, found[GAIN] = found[GAIN], torch.ones_like(found[GAIN])
    for name in READERS:
        if name != but:
            product = (found[name].double() * gain.double()).to(dtype)
            found[name] = product.flip(0) if order else product
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gain_in_all_readers_is_folded(dtype: torch.dtype) -> None:
    found = value(folded(dtype))
    assert (found.relation.kind, found.is_right) == ("folded", True)
    assert found.relation.words == "all 1: folded into q_proj, k_proj, v_proj"


def test_a_matrix_that_holds_an_uneven_gain_is_compared_with_the_gain_in_the_reference() -> None:
    held = tensors()
    signs = torch.where(torch.arange(len(held[GAIN])) % 2 == 0, 1.0, -1.0)
    held[GAIN] = signs * torch.logspace(-1, 1, len(signs))
    reference = replace(weights_of(held), settings=weights_of(FOLDER).settings, runtime="transformers")
    port = held | {GAIN: torch.ones_like(held[GAIN])} | {name: held[name] * held[GAIN] for name in READERS}
    found = compare_values(replace(weights_of(port), runtime="transformers", architecture="llama"), reference)
    assert next(each for each in found.tensors if each.name == GAIN).relation.kind == "folded"
    assert not found.others.matrices
    # Another matrix whose columns are as long is told still.
    drawn = torch.randn(port[READERS[2]].shape, generator=torch.Generator().manual_seed(0))
    port[READERS[2]] = drawn * port[READERS[2]].norm(dim=0) / drawn.norm(dim=0)
    found = compare_values(replace(weights_of(port), runtime="transformers", architecture="llama"), reference)
    assert found.others.matrices == {READERS[2]: "unrelated"}


def test_readers_whose_rows_are_in_another_order_show_it_by_their_columns() -> None:
    found = value(folded(order=True))
    assert (found.relation.kind, found.is_right) == ("folded", True)
    assert found.relation.words.endswith("as the norms of their columns show")


def test_quantized_readers_show_it_by_their_columns() -> None:
    port = folded()
    for name in READERS:
        step = port[name].abs().amax(1, keepdim=True) / 127
        port[name] = (port[name] / step).round() * step
    assert value(port).relation.kind == "folded"


def test_a_gain_in_no_reader_is_lost() -> None:
    port = tensors()
    port[GAIN] = torch.ones_like(port[GAIN])
    found = value(port)
    assert (found.relation.kind, found.is_right) == ("constant", False)
    assert found.relation.words == (
        "all 1, as initialised: the trained gain is lost (q_proj, k_proj, v_proj do not hold it)"
    )


def test_a_gain_in_some_readers_is_undecided_and_says_which() -> None:
    found = value(folded(but=READERS[1]))
    assert (found.relation.kind, found.is_right) == ("undecided", None)
    assert found.relation.words == "all 1: folded into q_proj, v_proj, lost for k_proj"


def test_readers_that_are_not_declared_leave_it_open() -> None:
    port = {name: torch.ones_like(each) if "norm" in name else each for name, each in folded().items()}
    found = value(port, is_declared=False)
    assert (found.relation.kind, found.is_right) == ("undecided", None)
    assert "what reads the norm is not known" in found.relation.words


def test_a_gain_is_lost_where_others_of_its_kind_kept_theirs() -> None:
    port = tensors()
    port[GAIN] = torch.ones_like(port[GAIN])
    found = value(port, is_declared=False)
    assert (found.relation.kind, found.is_right) == ("constant", False)
    assert found.relation.words == "all 1, as initialised: the trained gain is lost; others of its kind kept theirs"


def test_no_matrix_holds_the_gain_of_queries_and_keys() -> None:
    model, _ = tiny("qwen3", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    trained = {
        name: 1 + 0.3 * torch.randn(each.shape, generator=generator) if "norm" in name else each
        for name, each in model.state_dict().items()
    }
    settings = model.config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    reference = replace(weights_of(trained), runtime="transformers", architecture="qwen3", settings=settings)
    heads = [name for name in trained if "q_norm" in name]
    port = trained | {name: torch.ones_like(trained[name]) for name in heads}
    ours = replace(weights_of(port), runtime="transformers", architecture="qwen3")
    found = {each.name: each for each in compare_values(ours, reference).tensors}
    assert {found[name].is_right for name in heads} == {False}
    words = "all 1, as initialised: the trained gain is lost (the norm gives the scores, behind rotary positions)"
    assert {found[name].relation.words for name in heads} == {words}
    assert all(each.is_right for name, each in found.items() if name not in heads)


def test_a_reader_of_another_shape_leaves_it_open() -> None:
    port = folded()
    port[READERS[0]] = port[READERS[0]].T.contiguous()[:, :-1]
    found = value(port)
    assert (found.relation.kind, found.is_right) == ("undecided", None)
    assert "not told for q_proj" in found.relation.words


@pytest.mark.parametrize(("share", "kind"), [(1.0, "folded"), (0.0, "constant")])
def test_a_bias_is_folded_where_the_biases_of_all_readers_hold_it(share: float, kind: str) -> None:
    folder = demo.directory("layernorm")
    source = weights_of(folder).source
    port = {name: source.rows(name, 0, info.matrix[0]).reshape(info.shape) for name, info in source.tensors.items()}
    norm, reader = "transformer.h.1.ln_2", "transformer.h.1.mlp.c_fc"
    gain, bias, matrix = (port[name].double() for name in (f"{norm}.weight", f"{norm}.bias", f"{reader}.weight"))
    port[f"{reader}.weight"] = (gain[:, None] * matrix).float()
    port[f"{reader}.bias"] = (port[f"{reader}.bias"] + share * (bias @ matrix)).float()
    port |= {f"{norm}.weight": torch.ones(len(gain)), f"{norm}.bias": torch.zeros(len(gain))}
    ours = replace(weights_of(port), runtime="transformers", architecture="gpt2")
    found = {each.name: each for each in compare_values(ours, weights_of(folder)).tensors}
    assert found[f"{norm}.weight"].relation.kind == "folded"
    assert (found[f"{norm}.bias"].relation.kind, found[f"{norm}.bias"].is_right) == (kind, share == 1)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_normkit_folds_is_right(tmp_path: Path) -> None:
    fold(FOLDER, tmp_path / "folded")
    found = compare_values(weights_of(tmp_path / "folded"), weights_of(FOLDER))
    assert found.is_right is True
    assert {each.relation.kind for each in found.tensors} == {"equal", "folded"}


@pytest.mark.slow
@pytest.mark.parametrize("operations", [["exponent"], ["gain", "final"]])
def test_a_fold_with_a_head_of_its_own_is_the_same_by_its_numbers(tmp_path: Path, operations: list[str]) -> None:
    fold(FOLDER, tmp_path / "folded", operations=operations, untie=True)
    (tmp_path / "folded" / CERTIFICATE).unlink()
    found = nk.compare(tmp_path / "folded", FOLDER)
    assert found.verdict == "the same"
    assert found.values.is_right
    assert "lm_head.weight" in found.values.holding
    assert not found.metadata.differs


def test_a_gain_that_was_divided_is_right_where_all_its_readers_were_multiplied() -> None:
    held, scales = tensors(), torch.logspace(-1, 1, 64)
    port = held | {GAIN: held[GAIN] / scales} | {name: held[name] * scales for name in READERS}
    found = value(port)
    assert (found.relation.kind, found.is_right) == ("folded", True)
    assert found.relation.words == "other values, and the rest is folded into q_proj, k_proj, v_proj"
    assert value(port | {READERS[1]: held[READERS[1]]}).relation.kind == "different"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"operations": ["rotate"], "untie": True}, {"operations": ["scale"], "halvings": 3}]
)
def test_the_certificate_of_a_fold_says_what_differs_by_design(tmp_path: Path, options: dict[str, Any]) -> None:
    fold(FOLDER, tmp_path / "folded", **options)
    found = nk.compare(tmp_path / "folded", FOLDER)
    assert (found.verdict, found.causes) == ("the same", ())
    assert "as its certificate says" in describe_comparison(found).verdict.detail
    # It is believed only where the outputs are the same.
    port = nk.load(tmp_path / "folded")
    port.model.layers[1].mlp.up_proj.weight.data[0] *= 1.5
    port.save_pretrained(tmp_path / "changed")
    shutil.copytree(tmp_path / "changed", tmp_path / "folded", dirs_exist_ok=True)
    assert nk.compare(tmp_path / "folded", FOLDER).verdict == "different"
