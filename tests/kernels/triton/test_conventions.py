"""Conventions in every mixture of dtypes that the Triton kernels know."""

from __future__ import annotations

import pytest

from normkit.kernels.triton import loading
from sampled_conventions import PAIRS, assert_sample
from triton_kernels import moved, on_gpu_only

pytestmark = pytest.mark.usefixtures("kernels")

NARROW = [pair for pair in PAIRS if "fp64" not in pair]


def supported(spec, case):
    """On the GPU, where the kernels must take it."""
    case = moved(case)
    assert loading.supports_tensors(spec, case.x, case.weight, case.bias) is None
    return case


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize(("count", "sizes"), [(7, (24, 32)), on_gpu_only(60, (128, 200))])
@pytest.mark.parametrize("pair", NARROW, ids="-".join)
def test_conventions_in_every_mixture_of_dtypes(pair, count, sizes):
    assert_sample(pair, count, 100, sizes, supported)
