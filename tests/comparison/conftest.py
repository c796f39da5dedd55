"""The models that ship, a batch of the text that ships, and a copy of one model to plant differences in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normkit import demo
from normkit.checkpoint.loading import load_model

LAYERS = 3


@pytest.fixture(scope="session")
def twins() -> dict[str, Any]:
    """Their first three of six blocks, as each norm takes its time."""
    models: dict[str, Any] = {name: load_model(str(demo.directory(name))).model for name in ("layernorm", "rmsnorm")}
    gpt2, llama = models["layernorm"], models["rmsnorm"]
    gpt2.transformer.h, gpt2.config.n_layer = gpt2.transformer.h[:LAYERS], LAYERS
    llama.model.layers, llama.config.num_hidden_layers = llama.model.layers[:LAYERS], LAYERS
    return models


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
