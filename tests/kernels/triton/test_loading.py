"""Where the Triton kernels are not used, one line says why."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import normkit
from contract import Calls
from helpers import ROOT
from normkit import specs
from normkit.errors import InputError
from normkit.kernels.triton import loading

LAYER = specs.TORCH_LAYER_NORM


@pytest.fixture(autouse=True)
def _asked_afresh(monkeypatch):
    """What is found out once is found out again, and again after."""
    monkeypatch.delenv("NORMKIT_CUDA", raising=False)
    for function in (loading.load, loading._capability_reason):
        function.cache_clear()
    yield
    for function in (loading.load, loading._capability_reason):
        function.cache_clear()


@pytest.fixture
def _gpu(monkeypatch):
    """As if there were a GPU of today."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _index: (9, 0))


@pytest.mark.usefixtures("_gpu")
def test_kernels_that_have_not_run_on_a_gpu_are_not_the_default(monkeypatch):
    """They were: the first user with a GPU would have been the first who ran them."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    assert (ROOT / "benchmarks" / "results" / "gpu.json").exists() == loading._HAS_RUN_ON_A_GPU
    monkeypatch.setattr(loading, "_HAS_RUN_ON_A_GPU", False)
    for chosen in (None, "auto"):
        if chosen:
            monkeypatch.setenv("NORMKIT_CUDA", chosen)
        loading.load.cache_clear()
        assert loading.load() == (
            "they have not run on a GPU yet; NORMKIT_CUDA=on uses them, each kind of call after a self-check"
        )
    loading.load.cache_clear()
    monkeypatch.setattr(loading, "_HAS_RUN_ON_A_GPU", True)
    assert loading.load() is None


@pytest.mark.usefixtures("_gpu")
def test_there_are_kernels_where_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setenv("NORMKIT_CUDA", "on")
    assert loading.load() is None
    assert loading.device_reason(0) is None


@pytest.mark.usefixtures("_gpu")
def test_they_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("NORMKIT_CUDA", "off")
    assert loading.load() == "NORMKIT_CUDA=off"
    assert loading.device_reason(0) == "NORMKIT_CUDA=off"


@pytest.mark.parametrize("value", ["yes", "", "OFF", "1"])
def test_another_value_is_refused(monkeypatch, value):
    monkeypatch.setenv("NORMKIT_CUDA", value)
    with pytest.raises(InputError, match="NORMKIT_CUDA must be auto, on or off, got"):
        loading.load()


def test_a_torch_without_cuda(monkeypatch):
    monkeypatch.setenv("NORMKIT_CUDA", "on")
    monkeypatch.setattr(torch.version, "cuda", None)
    # As of torch for AMD, whose GPU calls itself cuda.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert loading.load() == "this torch is not built for CUDA"


@pytest.mark.usefixtures("_gpu")
def test_no_gpu_and_no_triton(monkeypatch):
    monkeypatch.setenv("NORMKIT_CUDA", "on")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert loading.load() == "Triton is not installed; torch for CUDA brings it"
    loading.load.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert loading.load() == "there is no CUDA GPU"


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(("capability", "is_old"), [((7, 5), True), ((8, 0), False), ((12, 0), False)])
def test_an_old_gpu(monkeypatch, capability, is_old):
    monkeypatch.setenv("NORMKIT_CUDA", "on")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _index: capability)
    assert loading.device_reason(1) == ("a GPU of compute capability 7.5; the kernels need 8.0" if is_old else None)


def test_the_compiler_takes_the_reason_for_a_constant():
    assert loading.device_reason._dynamo_marked_constant


class Named(torch.Tensor):
    """A class of a user's."""


ROW, PARAMETER = torch.ones(3, 8), torch.ones(8)


@pytest.mark.parametrize(
    ("spec", "tensors", "reason"),
    [
        (LAYER, (ROW, PARAMETER, PARAMETER), None),
        (LAYER, (ROW.bfloat16(), PARAMETER, PARAMETER.half(), ROW), None),
        (LAYER, (ROW, torch.nn.Parameter(PARAMETER), None), None),
        (LAYER, (ROW.double(), PARAMETER, None), "torch.float64"),
        (LAYER, (ROW, PARAMETER.double(), None), "torch.float64"),
        (LAYER, (ROW, None, PARAMETER.double()), "torch.float64"),
        (LAYER, (ROW, None, None, ROW.double()), "torch.float64"),
        (LAYER, (ROW.to(torch.float8_e4m3fn), None, None), "torch.float8_e4m3fn"),
        (LAYER, (ROW.as_subclass(Named), None, None), "tensors of class Named"),
        (LAYER, (ROW, PARAMETER.to("meta"), None), "tensors on meta and cpu"),
        (LAYER, (ROW, None, PARAMETER[:4]), "parameters that are not one number a feature"),
        (LAYER, (ROW[:, :0], None, None), "empty rows"),
        (specs.L2_NORM, (ROW, None, None), None),
        (specs.L2_NORM, (ROW.bfloat16(), None, None), "statistics in 16 bits"),
        (specs.L2_NORM, (ROW.bfloat16(), None, None, ROW), None),
    ],
)
def test_which_tensors_they_compute(spec, tensors, reason):
    assert loading.supports_tensors(spec, *tensors) == reason


@pytest.mark.usefixtures("kernels")
def test_unsupported_calls_are_computed_by_the_reference():
    """Through the public functions: neither is a wrong number given nor an error raised."""
    for dtype, parameter_dtype in ((torch.float64, torch.float64), (torch.bfloat16, torch.float64)):
        x, weight = torch.randn(4, 9, dtype=dtype).requires_grad_(), torch.randn(9, dtype=parameter_dtype)
        with Calls() as calls:
            y = normkit.layer_norm(x, (9,), weight)
            y.sum().backward()
        assert calls.names == []
        expected = torch.nn.functional.layer_norm(x.detach().double(), (9,), weight.double())
        assert (y.double() - expected).abs().max() < (1e-12 if dtype == torch.float64 else 0.05)
    with Calls() as calls:
        normkit.layer_norm(torch.randn(4, 9), (9,))
    assert calls.names == ["normalize_rows"]
