"""What planning may read: vectors, in float64, once."""

from __future__ import annotations

import pytest
import torch

from normkit.errors import ModelError
from planned_models import model_of, request_on


def test_gains_are_read_as_they_act():
    model = model_of("gemma2", dtype=torch.float32)
    request, _ = request_on(model, "gain")
    norm = request.graph.norms[0]
    gain = request.gain(norm)
    assert gain.dtype == torch.float64
    torch.testing.assert_close(gain, model.get_submodule(norm.name).weight.detach().double() + 1.0, rtol=0, atol=0)
    assert request.bias(norm) is None


def test_a_vector_is_read_once_and_a_nan_is_refused_by_name():
    model = model_of("gpt2")
    request, _ = request_on(model, "gain")
    name = "transformer.h.0.ln_1.weight"
    first = request.vector(name)
    assert request.vector(name) is first
    with torch.no_grad():
        model.transformer.h[1].ln_1.bias[0] = float("nan")
    with pytest.raises(ModelError, match=r"transformer\.h\.1\.ln_1\.bias"):
        request.vector("transformer.h.1.ln_1.bias")
