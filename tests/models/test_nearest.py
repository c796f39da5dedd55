"""The nearest declared families, by tensors."""

from __future__ import annotations

import pytest

from normkit.checkpoint.reader import ModelSource
from normkit.models.nearest import nearest_families
from tiny_models import tiny


@pytest.mark.slow
def test_families_with_the_same_tensors_are_all_named_and_else_what_differs():
    shapes = {name: info.shape for name, info in ModelSource(tiny("llama", tied=False)[0]).tensors.items()}
    alike = "nearest by its tensors are gemma, granite, llama, mistral and 1 more: 12 of 12 are alike"
    assert nearest_families(shapes) == alike
    # Another word before the layers, and other numbers in them, are no difference.
    assert nearest_families({name.replace("model.", "decoder."): shape for name, shape in shapes.items()}) == alike
    changed = {name.replace("mlp.gate_proj", "mlp.wide"): shape for name, shape in shapes.items()}
    expected = (
        "11 of 12 are alike; layers.*.mlp.wide.weight is here alone; layers.*.mlp.gate_proj.weight is there alone"
    )
    assert nearest_families(changed).endswith(expected)
    # A norm with a matrix in place of its gain is another thing.
    assert "11 of 12" in nearest_families(shapes | dict.fromkeys([n for n in shapes if "input_l" in n], (32, 32)))
    assert nearest_families({"a.0.b": (3,), "c": (4, 4)}) == ""
