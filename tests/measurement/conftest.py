"""The models that ship. What the norms of libraries compute is tested elsewhere, and found out once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

from known_norms import examined_once
from normkit import demo
from normkit.checkpoint.loading import load_model


@pytest.fixture(scope="module", autouse=True)
def _norms_are_examined_once() -> Iterator[None]:
    with examined_once():
        yield


@pytest.fixture(scope="session")
def twins() -> dict[str, nn.Module]:
    return {name: load_model(str(demo.directory(name))).model for name in ("layernorm", "rmsnorm")}


@pytest.fixture(scope="session")
def stock(twins: dict[str, nn.Module]) -> nn.Module:
    return twins["layernorm"]
