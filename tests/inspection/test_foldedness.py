"""How far models are from folded and centred: of every family, before and after folding, and where it is not known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import normkit as nk
from normkit import demo
from normkit.geometry import centred_defect
from normkit.inspection import foldedness as module
from normkit.inspection.foldedness import Foldedness, WriterForm, foldedness
from tiny_models import RECIPES, tiny


def found(model: nn.Module) -> Foldedness:
    form, unknown = foldedness(model, ())
    assert form is not None, unknown
    assert unknown == ""
    return form


def twin(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(demo.directory(name)).eval()


def text_batch() -> dict[str, Tensor]:
    return {"input_ids": torch.tensor(list(demo.text().encode()[:64]))[None]}


def writers(form: Foldedness) -> dict[str, WriterForm]:
    return {writer.name: writer for each in form.sums for writer in each.writers}


def centre_rows(table: Tensor) -> None:
    with torch.no_grad():
        table -= table.mean(-1, keepdim=True)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("family", RECIPES)
def test_every_declared_family_is_known(family: str) -> None:
    model, _ = tiny(family)
    form = found(model)

    # The tiny models are as far from both as random numbers are.
    assert form.norms
    assert all(norm.gain_defect is None or norm.gain_defect > 0.2 for norm in form.norms)
    assert not any(writer.is_centred for writer in writers(form).values())
    assert form.oddly_centred == ()


def test_a_norm_is_told_by_its_gain_its_bias_and_its_readers() -> None:
    model = twin("layernorm")
    norms = {norm.path: norm for norm in found(model).norms}

    assert len(norms) == 13
    first, last = norms["transformer.h.0.ln_1"], norms["transformer.ln_f"]
    gain, bias = (each.detach().double() for each in model.transformer.h[0].ln_1.parameters())
    assert first.gain_defect == pytest.approx(float((gain - 1).square().mean().sqrt()), rel=1e-12)
    assert first.largest_bias == float(bias.abs().max())
    assert (first.kind, first.readers, first.reason) == ("layer", ("transformer.h.0.attn.c_attn",), "")
    assert last.readers == ("lm_head",)
    assert last.reason.startswith("its reader lm_head shares the table transformer.wte.weight")


def test_a_gain_that_is_stored_less_one_counts_as_it_acts() -> None:
    model, _ = tiny("gemma")
    with torch.no_grad():
        model.model.norm.weight.zero_()
    norms = {norm.path: norm for norm in found(model).norms}
    assert norms["model.norm"].gain_defect == 0.0
    assert norms["model.norm"].largest_bias is None


def test_a_norm_without_a_gain_has_none() -> None:
    model, _ = tiny("olmo")
    assert {norm.gain_defect for norm in found(model).norms} == {None}


def test_a_writer_is_told_by_the_share_of_its_weight_and_bias() -> None:
    model, _ = tiny("gpt2")
    form = found(model)
    (residual,) = form.sums

    # Conv1D holds (in, out), tables hold what they write in rows.
    output, table = model.transformer.h[0].attn.c_proj, model.transformer.wte.weight.detach()
    matrix = torch.cat([output.weight.detach().T, output.bias.detach()[:, None]], 1)
    written = writers(form)
    assert (residual.name, residual.width, residual.reason) == ("residual", 32, "")
    assert written["transformer.h.0.attn.c_proj"].share == pytest.approx(float(centred_defect(matrix)), rel=1e-12)
    assert written["transformer.h.0.attn.c_proj"].vectors == 33
    assert written["transformer.h.0.attn.c_proj"].row_mean is None
    assert written["transformer.wte.weight"].share == pytest.approx(float(centred_defect(table.T)), rel=1e-12)
    means = float(table.mean(-1).square().mean().sqrt())
    assert written["transformer.wte.weight"].row_mean == pytest.approx(means, rel=1e-12)
    assert written["transformer.wte.weight"].reason.startswith("lm_head shares the table")
    assert written["transformer.wpe.weight"].reason == ""


def test_experts_that_are_fused_are_one_writer() -> None:
    model, _ = tiny("mixtral")
    written = writers(found(model))
    (name,) = [name for name in written if "layers.0" in name and "expert" in name]
    stacked = model.get_parameter(name).detach()
    # (expert, out, in): the experts side by side.
    matrix = stacked.transpose(0, 1).reshape(stacked.shape[1], -1)
    assert written[name].share == pytest.approx(float(centred_defect(matrix)), rel=1e-12)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_tensor_is_read_in_pieces(axis: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 100)
    tensor = (torch.randn(9, 8, 7, generator=torch.Generator().manual_seed(0)) + 0.3).to(dtype)
    matrix = tensor.double().movedim(axis, 0).flatten(1)

    energy = module._energy(tensor, axis)

    # Sums of 16-bit numbers are taken in float32, of at most 500 entries.
    assert energy.share == pytest.approx(float(centred_defect(matrix)), rel=1e-5 if dtype is torch.bfloat16 else 1e-12)
    assert (energy.width, energy.vectors) == (tensor.shape[axis], 504 // tensor.shape[axis])


def test_what_folding_leaves_is_told() -> None:
    model = twin("layernorm")
    nk.fold(model)
    norms = found(model).norms
    assert [norm.gain_defect == 0 for norm in norms] == [True] * 12 + [False]
    assert [norm.largest_bias == 0 for norm in norms] == [True] * 12 + [False]

    nk.fold(model, operations=["final"], untie=True)
    # The head has no bias, so that of the norm stays, divided by the gain.
    assert [norm.gain_defect for norm in found(model).norms] == [0.0] * 13
    assert (found(model).norms[-1].largest_bias or 0) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_writers_that_were_centred_are_told_in_every_dtype(dtype: torch.dtype) -> None:
    model = twin("layernorm").to(dtype)
    assert not any(writer.is_centred for writer in writers(found(model)).values())

    nk.fold(model, operations=["centre"])
    form = found(model)
    written = writers(form)
    # No LayerNorm sees it.
    assert form.oddly_centred == ()
    # The table is tied, so that it stays as it is.
    assert [name for name, writer in written.items() if not writer.is_centred] == ["transformer.wte.weight"]
    centre = {name: writer.share for name, writer in written.items() if writer.is_centred}
    assert max(centre.values()) < 1e-4 / 64


@pytest.mark.slow
def test_a_layer_norm_that_became_an_rmsnorm_counts_as_one() -> None:
    model = twin("layernorm")
    nk.fold(model, operations=["rms"], untie=True)
    form = nk.inspect(model, text_batch()).foldedness
    assert form is not None
    assert {norm.kind for norm in form.norms} == {"rms"}
    assert all(writer.is_centred for writer in writers(form).values())
    # It had to be centred: nothing is odd about it.
    assert form.oddly_centred == ()
    assert "is an RMSNorm, which sees the mean" in form.sums[0].reason


def test_embeddings_that_a_tool_centred_under_rmsnorms_are_named() -> None:
    model = twin("rmsnorm")
    assert found(model).oddly_centred == ()
    centre_rows(model.model.embed_tokens.weight)
    form = found(model)
    assert form.oddly_centred == ("model.embed_tokens.weight",)
    table = writers(form)["model.embed_tokens.weight"]
    assert table.is_centred
    assert table.row_mean is not None
    assert table.row_mean < 1e-7


def test_what_norms_add_to_a_sum_has_a_mean_beside_the_embeddings() -> None:
    model, _ = tiny("gemma2")
    centre_rows(model.model.embed_tokens.weight)
    assert found(model).oddly_centred == ("model.embed_tokens.weight",)


@pytest.mark.parametrize("value", [0.0, None])
def test_zeros_and_a_whole_centred_model_are_not_odd(value: float | None) -> None:
    model, _ = tiny("llama")
    outputs = [layer.self_attn.o_proj for layer in model.model.layers]
    if value is None:
        outputs += [layer.mlp.down_proj for layer in model.model.layers]
        centre_rows(model.model.embed_tokens.weight)
    with torch.no_grad():
        for output in outputs:
            output.weight -= output.weight.mean(0) if value is None else output.weight
    form = found(model)
    assert form.oddly_centred == ()
    assert sum(writer.is_centred for writer in writers(form).values()) == (5 if value is None else 2)


def test_a_bias_without_its_weight_does_not_make_a_writer_centred() -> None:
    model, _ = tiny("gpt2")
    output = model.transformer.h[0].mlp.c_proj
    with torch.no_grad():
        output.bias -= output.bias.mean()
    assert not writers(found(model))["transformer.h.0.mlp.c_proj"].is_centred
    with torch.no_grad():
        output.weight -= output.weight.mean(-1, keepdim=True)
    assert writers(found(model))["transformer.h.0.mlp.c_proj"].is_centred
    with torch.no_grad():
        output.bias += 1e-2
    assert not writers(found(model))["transformer.h.0.mlp.c_proj"].is_centred


def test_nan_is_neither_folded_nor_centred() -> None:
    model, _ = tiny("llama")
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
        model.model.embed_tokens.weight[0, 0] = float("nan")
    form = found(model)
    assert form.norms[-1].gain_defect != form.norms[-1].gain_defect
    assert not writers(form)["model.embed_tokens.weight"].is_centred


class Strange(nn.Linear):
    """Claims to be of a family, and is not."""

    def __init__(self, model_type: str) -> None:
        super().__init__(4, 4)
        self.config = SimpleNamespace(to_dict=lambda: {"model_type": model_type, "hidden_size": 4})


class Broken(Strange):
    """Fails when its weights are asked for."""

    def state_dict(self, *_arguments: Any, **_options: Any) -> Any:
        raise RuntimeError("no weights today\nnor tomorrow")


def quantized() -> nn.Module:
    model, _ = tiny("llama")
    layer = model.model.layers[0].self_attn.o_proj
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(4, 4), "what reads each norm is declared for classes of transformers, and Linear is none"),
        (Strange("unheard_of"), "expected a model of a declared family, got model_type 'unheard_of'"),
        (Strange(""), "expected a model of a declared family, got model_type ''"),
        (Strange("llama"), "expected one of the classes LlamaForCausalLM"),
        (Broken("llama"), "its weights could not be read: RuntimeError: no weights today"),
    ],
)
def test_what_is_not_known_is_said(model: nn.Module, reason: str) -> None:
    form, unknown = foldedness(model, ())
    assert form is None
    assert unknown.startswith(reason)
    assert "\n" not in unknown


def test_codes_of_a_quantized_model_are_not_taken_for_weights() -> None:
    form, unknown = foldedness(quantized(), ())
    assert form is None
    assert unknown.startswith("model.layers.0.self_attn.o_proj.weight is torch.int8")


@pytest.mark.slow
def test_an_inspection_tells_it_and_says_where_it_cannot() -> None:
    known = nk.inspect(twin("rmsnorm"), text_batch())
    assert known.foldedness == found(twin("rmsnorm"))
    assert known.foldedness_unknown == ""
    plain = known.to_json()["foldedness"]
    assert set(plain) == {"norms", "sums", "oddly_centred"}
    assert set(plain["norms"][0]) == {"path", "kind", "gain_defect", "largest_bias", "readers", "reason"}
    assert set(plain["sums"][0]["writers"][0]) == {"name", "share", "vectors", "row_mean", "is_centred", "reason"}

    unknown = nk.inspect(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), {"input": torch.randn(2, 5, 8)})
    assert unknown.foldedness is None
    assert unknown.foldedness_unknown.endswith("of transformers, and Sequential is none")
    assert unknown.to_json()["foldedness"] is None
