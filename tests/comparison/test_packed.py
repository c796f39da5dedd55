"""Quantized matrices of transformers and vLLM: fp8 and int8 are compared, packed ones named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import normkit as nk
from normkit.comparison.packed import PackedSource
from normkit.comparison.weights import weights_of

LAYERS, OUT, IN = 2, 128, 256
Parts = dict[str, Tensor]


def reference() -> Parts:
    generator = torch.Generator().manual_seed(0)
    made = {"model.norm.weight": 1 + 0.2 * torch.randn(IN, generator=generator)}
    for layer in range(LAYERS):
        made[f"model.layers.{layer}.input_layernorm.weight"] = 1 + 0.2 * torch.randn(IN, generator=generator)
        made[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.randn(OUT, IN, generator=generator)
    return made


def quantized(quantize: Callable[[Tensor], Parts]) -> Parts:
    made: Parts = {}
    for name, value in reference().items():
        path = name.removesuffix("weight")
        parts = {"weight": value} if value.dim() == 1 else quantize(value)
        made |= {f"{path}{part}": each.contiguous() for part, each in parts.items()}
    return made


def fp8(w: Tensor, side: int = 0, scale: str = "weight_scale", factor: float = 1.0) -> Parts:
    blocks = w.reshape(OUT // side, side, IN // side, side) if side else w.reshape(1, OUT, 1, IN)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    numbers = (blocks / scales).reshape(w.shape).to(torch.float8_e4m3fn)
    found = factor * scales[:, 0, :, 0]
    return {"weight": numbers, scale: found if side else found.reshape(1), "input_scale": torch.ones(1)}


def fp8_rows(w: Tensor) -> Parts:
    scales = w.abs().amax(1, keepdim=True) / 448
    return {"weight": (w / scales).to(torch.float8_e4m3fn), "weight_scale": scales.bfloat16()}


def int8(w: Tensor) -> Parts:
    most = w.abs().amax(1)
    return {"weight": (w / most[:, None] * 127).round().to(torch.int8), "SCB": most}


def gptq(bits: int, group: int) -> Callable[[Tensor], Parts]:
    return lambda _: {
        "qweight": torch.zeros(IN * bits // 32, OUT, dtype=torch.int32),
        "qzeros": torch.zeros(IN // group, OUT * bits // 32, dtype=torch.int32),
        "scales": torch.ones(IN // group, OUT, dtype=torch.float16),
        "g_idx": torch.arange(IN, dtype=torch.int32) // group,
    }


def awq(_: Tensor) -> Parts:
    return {
        "qweight": torch.zeros(IN, OUT // 8, dtype=torch.int32),
        "qzeros": torch.zeros(IN // 64, OUT // 8, dtype=torch.int32),
        "scales": torch.ones(IN // 64, OUT, dtype=torch.float16),
    }


def compressed(_: Tensor) -> Parts:
    return {
        "weight_packed": torch.zeros(OUT, IN // 8, dtype=torch.int32),
        "weight_scale": torch.ones(OUT, IN // 32).bfloat16(),
        "weight_shape": torch.tensor([OUT, IN]),
    }


def nf4(_: Tensor) -> Parts:
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [OUT, IN]})
    return {
        "weight": torch.zeros(OUT * IN // 2, 1, dtype=torch.uint8),
        "weight.absmax": torch.zeros(OUT * IN // 64, dtype=torch.uint8),
        "weight.quant_map": torch.zeros(16),
        "weight.nested_absmax": torch.zeros(2),
        "weight.nested_quant_map": torch.zeros(256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
    }


def compared(tmp_path: Path, quantize: Callable[[Tensor], Parts]) -> nk.Comparison:
    paths = [tmp_path / name for name in ("port.safetensors", "reference.safetensors")]
    save_file(quantized(quantize), paths[0])
    save_file(reference(), paths[1])
    return nk.compare(*paths)


@pytest.mark.parametrize(
    ("quantize", "words"),
    [
        (fp8, "rounded to fp8 (e4m3) with one scale"),
        (fp8_rows, "rounded to fp8 (e4m3) with a scale for each row"),
        (lambda w: fp8(w, 128, "weight_scale_inv"), "rounded to fp8 (e4m3) with a scale for each block of 128 x 128"),
        (int8, "rounded to 8 bits with a step for each row"),
    ],
)
def test_scaled_numbers_are_the_reference_s(tmp_path, quantize, words):
    found = compared(tmp_path, quantize)
    assert [each.partition(" (relative")[0] for each in found.values.others.near] == [f"the reference's, {words}"]
    assert found.values.others.extra == found.values.others.missing == ()
    assert (found.values.others.paired, found.differs) == (LAYERS, False)


def test_wrong_scales_are_not_taken_for_rounding(tmp_path):
    found = compared(tmp_path, lambda w: fp8(w, 128, "weight_scale_inv", factor=1.5))
    assert "fp8" not in "".join(found.values.others.near)
    assert "relative error at most 50" in "".join(found.values.others.near)


@pytest.mark.parametrize(
    ("quantize", "words"),
    [
        (gptq(4, 128), "GPTQ int4, groups of 128"),
        (gptq(3, 64), "GPTQ int3, groups of 64"),
        (gptq(8, IN), "GPTQ int8, a scale for each row"),
        (awq, "AWQ int4, groups of 64"),
        (compressed, "compressed-tensors int4, groups of 32"),
        (nf4, "bitsandbytes nf4, blocks of 64"),
    ],
)
def test_packed_matrices_are_named_and_not_called_the_same(tmp_path, quantize, words):
    found = compared(tmp_path, quantize)
    assert set(found.values.packed.values()) == {words}
    others = found.values.others
    assert (others.paired, others.missing, others.extra, dict(others.reshaped)) == (LAYERS, (), (), {})
    assert f"stored as {words}, and not compared" in " ".join(str(found).split())
    assert found.verdict == "undecided"
    assert all(each.is_right for each in found.values.groups)


def test_dequantized_rows_are_numbers_times_scales():
    w = reference()["model.layers.0.mlp.up_proj.weight"]
    parts = {f"a.{name}": each for name, each in fp8(w, 64, "weight_scale_inv").items()}
    source = PackedSource(weights_of(parts).source)
    expected = parts["a.weight"].float().reshape(2, 64, 4, 64) * parts["a.weight_scale_inv"][:, None, :, None]
    assert list(source.tensors) == ["a.weight"]
    assert torch.equal(source.rows("a.weight", 30, 100), expected.reshape(OUT, IN)[30:100])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"a.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(3)},
            "scales of shape [3]",
        ),
        (
            {"a.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(1, dtype=torch.uint8)},
            "scales of U8",
        ),
    ],
)
def test_scales_that_do_not_fit_leave_a_matrix_as_it_is(parts, words):
    source = PackedSource(weights_of(parts).source)
    assert source.left["a.weight"].endswith(words)
    assert not source.forms


@pytest.mark.parametrize(
    "parts",
    [
        {"a.qweight": torch.zeros(8, 8, dtype=torch.int32)},
        {"a.qweight": torch.zeros(8, dtype=torch.int32), "a.scales": torch.ones(8)},
        {
            "a.qweight": torch.zeros(8, 0, dtype=torch.int32),
            "a.scales": torch.ones(1, 0),
            "a.qzeros": torch.zeros(1, 0),
        },
        {"a.weight": torch.zeros(8, 1, dtype=torch.uint8), "a.weight.quant_state.bitsandbytes__fp4": torch.zeros(4)},
        {
            "a.weight_packed": torch.zeros(8, 8, dtype=torch.int32),
            "a.weight_scale": torch.ones(8, 8),
            "a.weight_shape": torch.tensor([-8, 0]),
        },
    ],
)
def test_parts_that_make_no_matrix_do_no_harm(parts):
    assert PackedSource(weights_of(parts).source).tensors
