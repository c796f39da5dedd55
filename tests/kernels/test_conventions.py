"""Every convention that a norm of trailing axes can have, in every mixture of dtypes; and what computes each preset."""

from __future__ import annotations

import pytest
import torch

import normkit
from contract import DTYPES, HALF, Calls
from helpers import PRESETS, arguments
from normkit import specs
from normkit.kernels import cpu, signatures
from sampled_conventions import CONVENTIONS, PAIRS, assert_sample, sample

TRAILING = "rows that are not the trailing axes"
IN_16_BITS = "statistics in 16 bits"
# Why the kernels leave a preset to the reference: for any input, or for 16-bit input alone.
NEVER = {
    "CONVNEXT": TRAILING,
    "POOLFORMER": TRAILING,
    "POCKET_TTS": "centring of the numerator or of the statistics alone",
    "MUSE_SPARK_INPUT_SCALED": "a gain before the norm",
}
NOT_IN_16_BITS = {"ANNOTATED_TRANSFORMER", "IMAGEGPT", "L2_NORM", "X_TRANSFORMERS_RMS"}


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_conventions_in_every_mixture_of_dtypes(pair):
    """Forward and all gradients against the reference in float64, 60 conventions a pair of dtypes."""
    assert_sample(pair, 60, 0)


@pytest.mark.slow
def test_the_sample_holds_every_pair_of_conventions():
    names = ("centre_numerator", "reduction", "correction", "eps_placement", "multiplier", "cast", "has_weight")
    names += ("weight_offset", "offset_dtype", "has_bias", "round_rstd", "output_dtype")

    def pairs(conventions):
        return {
            (a, getattr(spec, a), b, getattr(spec, b)) for spec in conventions for a in names for b in names if a < b
        }

    tried = [spec for index in range(len(PAIRS)) for spec in sample(60, index)]
    assert pairs(tried) == pairs(CONVENTIONS)
    assert len(set(CONVENTIONS)) == len(CONVENTIONS) == 10368


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_implementation_of_each_preset(name, dtype):
    """The table above holds, and the public function does what it says, forward and backward."""
    spec, dtype = PRESETS[name], DTYPES[dtype]
    reason = NEVER.get(name) or (IN_16_BITS if name in NOT_IN_16_BITS and dtype in HALF else None)
    given = arguments(spec, dtype=dtype)
    assert cpu.supports(spec, *given) == reason
    # Rows along the channels are computed as rows of an input with the channels moved last.
    reason = None if spec.axes == (1,) else reason
    with Calls() as calls:
        leaves = [None if tensor is None else tensor.requires_grad_() for tensor in given]
        normkit.normalize(leaves[0], spec, *leaves[1:]).sum().backward()
    forward_and_backward = ["normalize_forward", "normalize_backward"]
    assert calls.names == ([] if reason or cpu.load() else forward_and_backward)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_the_implementation_of_torchs_norms(name, pair):
    """The kernels, whatever the dtypes, but for a float64 parameter of a narrower input."""
    dtype, parameter_dtype = (DTYPES[part] for part in pair)
    x, weight = torch.randn(3, 8, dtype=dtype, requires_grad=True), torch.ones(8, dtype=parameter_dtype)
    residual = [torch.randn(3, 8, dtype=dtype)] if name.startswith("add") else []
    with Calls() as calls:
        y = getattr(normkit, name)(x, *residual, (8,), weight)
        (y[0] if residual else y).sum().backward()
    is_wide = parameter_dtype == torch.float64 != dtype
    expected = ["add_normalize_forward" if residual else "normalize_forward", "normalize_backward"]
    assert calls.names == ([] if is_wide or cpu.load() else expected)


def test_no_gradient_wanted_takes_the_plain_operators():
    x, out = torch.randn(3, 8), torch.empty(3, 8)
    with Calls() as calls:
        normkit.rms_norm(x, (8,))
        normkit.normalize(x, specs.NANOCHAT, out=out)
        normkit.add_rms_norm(x, x, (8,))
        normkit.add_normalize(x, x, specs.NANOCHAT, out=(out, torch.empty(3, 8)))
    expected = ["normalize_rows", "normalize_rows_out", "add_normalize_forward", "add_normalize_rows_out"]
    assert calls.names == ([] if cpu.load() else expected)


def test_a_preset_that_is_left_to_the_reference_is_no_row_of_trailing_axes_or_in_16_bits():
    """The kernels cover the rest: a new preset that they cannot compute must be named above."""
    assert {name for name, spec in PRESETS.items() if signatures.supports_spec(spec)} == set(NEVER)
    assert {name for name, spec in PRESETS.items() if spec.statistics_dtype == "input"} - set(NEVER) == NOT_IN_16_BITS
