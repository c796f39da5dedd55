"""The models that ship."""

from __future__ import annotations

import pytest
from torch import nn

from normkit import demo
from normkit.checkpoint.loading import load_model


@pytest.fixture(scope="session")
def twins() -> dict[str, nn.Module]:
    return {name: load_model(str(demo.directory(name))).model for name in ("layernorm", "rmsnorm")}


@pytest.fixture(scope="session")
def stock(twins: dict[str, nn.Module]) -> nn.Module:
    return twins["layernorm"]
