"""Grids of quantized numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from normkit.comparison.quantization_grid import grid_steps
from normkit.comparison.relations import relation


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
