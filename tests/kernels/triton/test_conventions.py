"""Conventions in every mixture of dtypes that the Triton kernels know."""

from __future__ import annotations

import pytest
import torch

from contract import DTYPES, draw
from normkit.kernels.triton import loading
from sampled_conventions import PAIRS, assert_conventions, sample
from triton_kernels import moved, on_gpu_only

pytestmark = pytest.mark.usefixtures("kernels")

NARROW = [pair for pair in PAIRS if "fp64" not in pair]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "sizes"), [(7, (24, 32)), on_gpu_only(60, (128, 200))])
@pytest.mark.parametrize("pair", NARROW, ids="-".join)
def test_conventions_in_every_mixture_of_dtypes(pair, count, sizes):
    dtype, parameter_dtype = (DTYPES[name] for name in pair)
    for spec in sample(count, 100 + PAIRS.index(pair)):
        # Half of the rows are short enough for a clamp to hold them.
        case = draw(spec, *sizes, dtype=dtype, parameter_dtype=parameter_dtype, mean=0.3)
        x = case.x.double() * torch.tensor([1.0, 0.02]).double().repeat(sizes[0] // 2).unsqueeze(1)
        case = moved(case._replace(x=x.to(dtype)))
        assert loading.supports_tensors(spec, case.x, case.weight, case.bias) is None
        try:
            assert_conventions(spec, case)
        except AssertionError as error:
            raise AssertionError(f"{error}: {spec!r}") from error
