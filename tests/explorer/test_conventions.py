"""Which specs the page can draw, and that what it draws is what they compute."""

from __future__ import annotations

import re

import pytest
import torch

from normkit import reference, specs
from normkit.errors import SpecError
from normkit.explorer.conventions import Convention, convention_of
from normkit.spec import NormSpec

N = 6

DRAWN = {
    "torch": (specs.TORCH_LAYER_NORM, "layer"),
    "bert": (specs.BERT, "layer"),
    "gemma": (specs.GEMMA, "rms"),
    "llama": (specs.LLAMA, "rms"),
    "no eps": (NormSpec(eps=0), "layer"),
    "outside": (NormSpec(eps=1e-2, eps_placement="outside"), "layer"),
    "machine eps": (specs.TORCH_RMS_NORM, "rms"),
    "clamped at 0": (specs.L2_NORM.replace(eps=0), "length"),
    "length": (specs.L2_NORM.replace(eps=1e-3, eps_placement="inside"), "length"),
    "length outside": (specs.L2_NORM.replace(eps=1e-3, eps_placement="outside"), "length"),
    "root n times a length": (specs.X_TRANSFORMERS_RMS.replace(eps=1e-2, eps_placement="inside"), "rms"),
    "root n times a length, outside": (specs.X_TRANSFORMERS_RMS.replace(eps=1e-2, eps_placement="outside"), "rms"),
    "root n times a centred length": (NormSpec(reduction="sum", multiplier="sqrt_n", eps=1e-2), "layer"),
}


def drawn(x: torch.Tensor, made: Convention) -> torch.Tensor:
    """What the page computes, gain and bias aside."""
    v = x - x.mean(-1, keepdim=True) if made.mode == "layer" else x
    size = v.square().sum(-1, keepdim=True)
    size = size if made.mode == "length" else size / x.shape[-1]
    return v / ((size + made.eps).sqrt() if made.place == "inside" else size.sqrt() + made.eps)


@pytest.mark.parametrize(("spec", "mode"), DRAWN.values(), ids=DRAWN)
def test_what_is_drawn_is_what_the_spec_computes(spec: NormSpec, mode: str) -> None:
    # Small rows, so that eps counts; float32, so that eps=None is its machine epsilon; float64 arithmetic within.
    x = 1e-2 * torch.randn(5, N)
    made = convention_of(spec, N)
    bare = spec.replace(has_weight=False, has_bias=False, weight_offset=0.0)
    expected = reference.forward(x, bare)
    assert made.mode == mode
    torch.testing.assert_close(drawn(x.double(), made).float(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (NormSpec(axes=(1,)), "over axis 1"),
        (NormSpec(axes=(-2, -1)), "last axis"),
        (NormSpec(axes="all_but_batch", groups=2), "last axis"),
        (NormSpec(groups=2), "2 groups"),
        (specs.MUSE_SPARK_INPUT_SCALED, "before it normalizes"),
        (specs.SCALE_NORM, "clamp"),
        (specs.ANNOTATED_TRANSFORMER, "gives rows the length sqrt(n - 1), and the page draws sqrt(n), or 1 without"),
        (NormSpec(centre_numerator=False), "the mean is subtracted for the statistics only"),
        (NormSpec(centre_statistics=False), "the mean is subtracted, but not for the statistics"),
        (NormSpec(multiplier="sqrt_n"), "gives rows the length n, "),
        (NormSpec(reduction="sum"), "gives rows the length 1, "),
        (NormSpec(eps=1e-13), "its eps is 1e-13"),
        (NormSpec(eps=11), "its eps is 11"),
        (NormSpec(eps=-1e-5), "its eps is -1e-05"),
    ],
)
def test_what_the_page_has_no_picture_for_is_refused_with_the_reason(spec: NormSpec, reason: str) -> None:
    with pytest.raises(SpecError, match=re.escape(reason)):
        convention_of(spec, N)


def test_the_machine_epsilon_of_float64_is_below_what_the_page_shows() -> None:
    assert convention_of(specs.TORCH_RMS_NORM, N, torch.bfloat16).eps == 2**-23
    with pytest.raises(SpecError, match="2\\.22045e-16"):
        convention_of(specs.TORCH_RMS_NORM, N, torch.float64)
