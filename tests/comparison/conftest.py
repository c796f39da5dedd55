"""The models that ship, a batch of the text that ships, and a copy of one model to plant differences in."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from normkit import demo
from normkit.checkpoint.loading import load_model


@pytest.fixture(scope="session")
def twins() -> dict[str, nn.Module]:
    return {name: load_model(str(demo.directory(name))).model for name in ("layernorm", "rmsnorm")}


@pytest.fixture(scope="session")
def batch() -> dict[str, Tensor]:
    text = torch.tensor([list(demo.text().encode()[:512])]).reshape(4, 128)
    return {"input_ids": text, "attention_mask": torch.ones_like(text)}


@pytest.fixture
def port(twins: dict[str, nn.Module]) -> nn.Module:
    return copy.deepcopy(twins["layernorm"])


@pytest.fixture(scope="session")
def stock(twins: dict[str, nn.Module]) -> nn.Module:
    return twins["layernorm"]
