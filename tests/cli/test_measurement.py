"""A run that takes long in the dtype of a checkpoint is told of beforehand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit.cli import measurement
from normkit.cli.measurement import slow_dtype
from normkit.measurement.texts import Batches


class Weights(nn.Linear):
    """A model of 10,100 parameters with the attributes of one of transformers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(100, 100, dtype=dtype)
        self.dtype, self.device = dtype, torch.device("cpu")


def batches(tokens: int) -> Batches:
    return Batches(batches=({"input_ids": torch.zeros(1, tokens, dtype=torch.long)},), source="", decode=None)


@pytest.mark.parametrize("is_supported", [False, True])
@pytest.mark.parametrize(("dtype", "operator"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_a_long_run_in_a_dtype_that_the_cpu_lacks_is_told_of(dtype, operator, is_supported, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{operator}_supported", lambda: is_supported, raising=False)
    monkeypatch.setattr(measurement, "_LONG", 10_100 * 20)
    said = slow_dtype(Weights(dtype), batches(20))
    assert (said is None) is is_supported
    assert said is None or str(dtype).removeprefix("torch.") in said.split(":")[0]
    assert slow_dtype(Weights(dtype), batches(19)) is None
    assert slow_dtype(Weights(torch.float32), batches(20)) is None
    assert (
        slow_dtype(Weights(dtype), Batches(batches=({"pixel_values": torch.ones(9)},), source="", decode=None)) is None
    )
