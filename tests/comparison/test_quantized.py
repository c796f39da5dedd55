"""Matrices that MLX has quantized, and the grids of quantized numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from normkit.comparison.quantized import BITS, MlxSource, grid_steps, has_other_scales, unpacked
from normkit.comparison.relations import relation
from normkit.comparison.values import compare_values
from normkit.comparison.weights import weights_of
from normkit.errors import ModelError

# mx.quantize and mx.dequantize of mlx 0.32.4, float16, one group of 32: words, scale, bias, numbers at some places.
PLACES = [0, 1, 7, 10, 12, 21, 31]
FROM_MLX: dict[int, tuple[list[int], float, float, list[float]]] = {
    2: (
        [2050650983, 2590490086],
        1.150390625,
        -2.30078125,
        [1.150390625, -1.150390625, -1.150390625, 1.150390625, 0.0, 1.150390625, 0.0],
    ),
    3: (
        [4251352063, 2099582931, 3514243995],
        -0.419921875,
        2.099609375,
        [-0.83984375, -0.83984375, 0.83984375, -0.83984375, 0.0, -0.419921875, -0.419921875],
    ),
    4: (
        [2916099206, 1465513815, 2055698329, 2259252296],
        -0.273681640625,
        2.189453125,
        [0.546875, 0.0, -0.546875, 0.2734375, -0.2734375, 0.0, 0.0],
    ),
    5: (
        [1296389651, 740948315, 3068751585, 3496606477, 1758326810],
        -0.12310791015625,
        1.9697265625,
        [-0.3701171875, 0.0, 0.615234375, 0.73828125, -0.2470703125, -1.6005859375, 0.369140625],
    ),
    6: (
        [275118929, 3299370698, 2933399178, 2762352872, 2146370010, 1243078530],
        0.0736083984375,
        -2.4296875,
        [-1.1787109375, 0.8828125, -0.58984375, 0.80859375, -0.220703125, 0.662109375, -1.1044921875],
    ),
    8: (
        [2743389360, 2254019701, 1589182228, 2677055488, 2758517573, 1215660251, 2222110360, 2102367874],
        -0.0173187255859375,
        2.529296875,
        [-0.51953125, -1.00390625, 0.208984375, -0.658203125, 2.529296875, 0.3125, 0.365234375],
    ),
}


def packed(numbers: list[int], bits: int) -> list[int]:
    """Whole numbers packed from the lowest bit of the first word on."""
    whole = sum(number << (bits * place) for place, number in enumerate(numbers))
    return [(whole >> (32 * word)) & 0xFFFFFFFF for word in range(len(numbers) * bits // 32)]


def quantized(path: str, bits: int, *, rows: int = 3, columns: int = 64, group: int = 32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(bits)
    numbers = torch.randint(0, 2**bits, (rows, columns), generator=generator)
    scales, biases = (torch.randn(rows, columns // group, generator=generator).half() for _ in range(2))
    values = numbers.reshape(rows, -1, group).half() * scales[..., None] + biases[..., None]
    words = torch.tensor([packed(row, bits) for row in numbers.tolist()], dtype=torch.int64).to(torch.uint32)
    return {
        f"{path}.weight": words,
        f"{path}.scales": scales,
        f"{path}.biases": biases,
        f"{path}.expected": values.reshape(rows, columns),
    }


@pytest.mark.parametrize("bits", BITS)
def test_numbers_of_mlx_itself(bits: int) -> None:
    words, scale, bias, numbers = FROM_MLX[bits]
    tensors = {
        "x.weight": torch.tensor([words], dtype=torch.int64).to(torch.uint32),
        "x.scales": torch.tensor([[scale]]).half(),
        "x.biases": torch.tensor([[bias]]).half(),
    }
    source = MlxSource(weights_of(tensors).source, {"bits": bits, "group_size": 32})
    assert source.rows("x.weight", 0, 1)[0, PLACES].tolist() == numbers


@pytest.mark.parametrize("bits", BITS)
def test_every_width_is_unpacked_to_the_bit(bits: int) -> None:
    numbers = [(7 * place + place**2) % 2**bits for place in range(64)]
    words = torch.tensor([packed(numbers, bits)], dtype=torch.int64).to(torch.uint32)
    assert unpacked(words, bits).tolist() == [[float(number) for number in numbers]]


def test_modules_with_their_own_width_and_modules_left_alone() -> None:
    tensors = quantized("a", 4) | quantized("b", 3) | {"c.weight": torch.ones(2, 4), "norm.weight": torch.ones(4)}
    settings = {"bits": 4, "group_size": 32, "b": {"bits": 3, "group_size": 32}, "c": False}
    source = MlxSource(weights_of(tensors).source, settings)
    assert [*source.tensors] == ["a.weight", "a.expected", "b.weight", "b.expected", "c.weight", "norm.weight"]
    for path in "ab":
        assert source.tensors[f"{path}.weight"] == source.tensors[f"{path}.expected"]
        assert torch.equal(source.rows(f"{path}.weight", 1, 3), tensors[f"{path}.expected"][1:])
    assert ({name: source.group(name) for name in source.tensors}, source.left) == (
        {"a.weight": 32, "a.expected": 0, "b.weight": 32, "b.expected": 0, "c.weight": 0, "norm.weight": 0},
        {},
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, "quantized as 'mxfp4'"),
        ({}, "bits and group size are in config.json, which is not at hand"),
        ({"bits": 7, "group_size": 32}, "bits and group size are in config.json, which is not at hand"),
        ({"bits": 4, "group_size": "32"}, "bits and group size are in config.json, which is not at hand"),
        ({"a": 3}, "bits and group size are in config.json, which is not at hand"),
    ],
)
def test_what_cannot_be_dequantized_stays_with_the_reason(settings: dict[str, Any], reason: str) -> None:
    source = MlxSource(weights_of(quantized("a", 4)).source, settings)
    assert source.left == {"a.weight": reason}
    assert source.tensors["a.weight"].dtype == "U32"
    assert source.rows("a.weight", 0, 1).dtype is torch.uint32


@pytest.mark.parametrize("settings", [{"bits": 8, "group_size": 32}, {"bits": 4, "group_size": 64}])
def test_another_width_than_the_configuration_says_is_one_line(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"expected a\.weight of \d bits in groups of"):
        MlxSource(weights_of(quantized("a", 4)).source, settings)


def rounded(matrix: Tensor, bits: int, group: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers, scales and shifts of a matrix, as mx.quantize makes them (mlx, mlx/ops.cpp, affine_quantize)."""
    parts = matrix.reshape(len(matrix), -1, group)
    low, high = parts.amin(2), parts.amax(2)
    scale = ((high - low) / (2**bits - 1)).clamp_min(1e-7)
    is_low = low.abs() > high.abs()
    scale, edge = torch.where(is_low, scale, -scale), torch.where(is_low, low, high)
    zero = (edge / scale).round()
    scale = torch.where(zero == 0, scale, edge / zero)
    shift = torch.where(zero == 0, 0, edge)
    return ((parts - shift[..., None]) / scale[..., None]).round().clamp(0, 2**bits - 1), scale, shift


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_scales_of_other_groups_are_seen_and_what_training_or_a_fold_leaves_is_not(bits: int, axis: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    reference = torch.randn(14, 576, generator=generator).double()
    columns, rows = 1 + 0.3 * torch.rand(576, generator=generator), 1 + torch.rand(14, 1, generator=generator)
    tuned = reference + 0.2 * torch.randn(14, 8, generator=generator) @ torch.randn(8, 576, generator=generator)
    for source in (reference, reference * columns, reference * rows, tuned, torch.randn_like(reference)):
        whole, scale, shift = rounded(source, bits)
        right, wrong = (whole * each[..., None] + shift[..., None] for each in (scale, scale.roll(1, axis)))
        assert not has_other_scales(right.reshape(14, 576), reference, 64)
        if source is reference:
            assert has_other_scales(wrong.reshape(14, 576), reference, 64)


def test_a_folder_of_mlx_against_its_source(tmp_path: Path) -> None:
    made = quantized("model.layers.0.q_proj", 4, rows=8)
    norm = {"model.norm.weight": torch.randn(64).bfloat16()}
    plain = {"model.layers.0.q_proj.weight": made.pop("model.layers.0.q_proj.expected")}
    config = {"model_type": "gemma3_text", "rms_norm_eps": 1e-6}
    for folder, tensors, quantization, form in (
        ("port", made | norm, {"quantization": {"bits": 4, "group_size": 32}}, "mlx"),
        ("reference", plain | norm, {}, "pt"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config | quantization))
        save_file(tensors, tmp_path / folder / "model.safetensors", metadata={"format": form})
    port, reference = weights_of(tmp_path / "port"), weights_of(tmp_path / "reference")
    assert (port.runtime, reference.runtime) == ("MLX", "transformers")
    found = compare_values(port, reference)
    assert found.is_right is True
    assert (found.others.paired, found.others.missing, found.others.extra, found.others.reshaped) == (1, (), (), {})
    assert found.others.matrices == {}
    made["model.layers.0.q_proj.scales"] = made["model.layers.0.q_proj.scales"].roll(1, 1)
    save_file(made | norm, tmp_path / "port" / "model.safetensors", metadata={"format": "mlx"})
    found = compare_values(weights_of(tmp_path / "port"), reference)
    assert found.others.matrices == {"model.layers.0.q_proj.weight": "scales of other groups"}
    assert found.is_right is True


def test_each_block_has_its_step() -> None:
    counts = torch.tensor([[0, 3, 4, 9], [0, 2, 5, 7]]).double()
    steps = torch.tensor([[0.25], [0.5]]).double()
    found = grid_steps((counts * steps + 1).reshape(-1), 4)
    assert found is not None
    assert torch.equal(found, steps.expand(-1, 4).reshape(-1))


def test_numbers_on_no_grid_have_no_step() -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(0)).double()
    assert grid_steps(values, 64) is None
    assert grid_steps(values, 48) is None
    assert grid_steps(torch.ones(64).double(), 64) is None
    assert grid_steps(values[:1], 1) is None


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_gains_that_llama_cpp_s_own_package_quantized(kind: str, constant: float) -> None:
    gguf = pytest.importorskip("gguf")
    generator = torch.Generator().manual_seed(3)
    reference = 1 + 0.3 * torch.randn(640, generator=generator)
    encoding = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize((reference + constant).numpy().astype(np.float32), encoding)
    port = torch.from_numpy(gguf.quants.dequantize(stored, encoding)).double()
    found = relation(port, reference.double(), "F32", "F32")
    assert (found.kind, found.constant) == ("offset" if constant else "equal", constant or None)
    assert "within a quantization step of" in found.words or "within a unit of" in found.words
