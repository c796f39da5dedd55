"""Which conventions and sizes any kernel computes."""

from __future__ import annotations

import pytest
import torch

from helpers import PRESETS
from normkit import specs
from normkit.kernels import support

TRAILING = "rows that are not the trailing axes"
LAYER = specs.TORCH_LAYER_NORM


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (LAYER, None),
        (LAYER.replace(axes=(-3, -2, -1)), None),
        (LAYER.replace(axes=tuple(range(-15, 0))), None),
        (LAYER.replace(axes=tuple(range(-16, 0))), "rows of more than 15 axes"),
        (specs.CONVNEXT, TRAILING),
        (specs.POOLFORMER, TRAILING),
        (LAYER.replace(centre_numerator=False), "centring of the numerator or of the statistics alone"),
        (LAYER.replace(centre_statistics=False), "centring of the numerator or of the statistics alone"),
        (specs.MUSE_SPARK_INPUT_SCALED, "a gain before the norm"),
        (specs.LLAMA.replace(output_dtype="float32"), "an output that is always float32"),
    ],
)
def test_which_conventions(spec, reason):
    assert support.supports_spec(spec) == reason


def test_most_presets_are_supported():
    assert sum(support.supports_spec(spec) is None for spec in PRESETS.values()) >= 20


def test_sizes():
    x, weight = torch.ones(2, 3, 4), torch.ones(4)
    assert support.supports_sizes(1, x, weight, weight) is None
    assert support.supports_sizes(1, x[:0], weight, None) is None
    assert support.supports_sizes(1, x[..., :0], None, None) == "empty rows"
    assert support.supports_sizes(2, x, torch.ones(3, 4), None) is None
    for wrong in (torch.ones(5), torch.ones(1), torch.ones(2, 3, 4)):
        assert support.supports_sizes(1, x, wrong, None) == "parameters that are not one number a feature"
        assert support.supports_sizes(1, x, None, wrong) == "parameters that are not one number a feature"
    assert support.supports_sizes(2, x, torch.ones(4, 3), None) == "parameters that are not one number a feature"
