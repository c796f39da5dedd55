"""The mapping names layers that exist in a repository that `kernels` can load."""

from __future__ import annotations

import pytest
from kernels import get_local_kernel

from normkit import hub_kernels
from normkit.errors import InputError
from normkit.kernels.triton import loading


@pytest.mark.parametrize(("reason", "expected"), [(None, ["cpu", "cuda"]), ("NORMKIT_CUDA=off", ["cpu"])])
def test_the_repository_holds_every_layer(monkeypatch, reason, expected):
    """A GPU is named where the kernels for it are on: else its model would run on plain torch, slower than its own."""
    monkeypatch.setattr(loading, "load", lambda: reason)
    for devices in hub_kernels.mapping().values():
        assert list(devices) == expected
        layers = get_local_kernel(devices["cpu"]._repo_path).layers
        assert hasattr(layers, devices["cpu"].layer_name)


def test_without_the_package_one_line_says_so(monkeypatch):
    monkeypatch.setattr(hub_kernels, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="pip install kernels"):
        hub_kernels.mapping()
