"""How a model is run to be looked at: in evaluation mode, on its own device, on a batch or on the beginning of one."""

from __future__ import annotations

import inspect as signatures
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Batch = Mapping[str, Tensor]

# Enough to see every module called; the structure of a model does not depend on its input.
_STRUCTURE_TOKENS = 16


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no cache inside; outside, every module's own mode and the configuration's word on caches."""
    training = {module: module.training for module in model.modules()}
    # Some models take use_cache through **kwargs only: what a replayed block adds to a cache would stay in it.
    configs: dict[int, Any] = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    model.eval()
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True
        for module, mode in training.items():
            module.training = mode


def runner(model: nn.Module, batch: Batch) -> Callable[[], object]:
    """A call of the model on a batch on its own device, without a cache of keys and values."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    arguments: dict[str, object] = {key: value.to(device) for key, value in batch.items()}
    if "use_cache" in signatures.signature(model.forward).parameters:
        arguments["use_cache"] = False
    return lambda: model(**arguments)


def shortened(batch: Batch) -> dict[str, Tensor]:
    """The first row's first tokens, all of them attended to."""
    small = {key: value[:1, :_STRUCTURE_TOKENS] if value.dim() > 1 else value for key, value in batch.items()}
    return {key: torch.ones_like(value) if key.endswith("attention_mask") else value for key, value in small.items()}


def token_mask(batch: Batch) -> Tensor | None:
    """True where a token counts, or None where all do."""
    mask = batch.get("attention_mask")
    return None if mask is None or bool(mask.all()) else mask.bool()


def vocabulary(model: nn.Module) -> int | None:
    """How many tokens a model embeds, or None where that is not known.

    A model of transformers tells; of any other the last linear layer does, where some embedding has as many entries as
    it has outputs.
    """
    find = getattr(model, "get_input_embeddings", None)
    if find is not None:
        try:
            return int(find().weight.shape[0])
        except (AttributeError, NotImplementedError):
            return None
    outputs = [module.out_features for module in model.modules() if isinstance(module, nn.Linear)][-1:]
    embedded = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    return next((size for size in outputs if size in embedded), None)
