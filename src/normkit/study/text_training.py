"""The steps that experiments with transformers share: build one from the settings, train it on text, draw token ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.study.arm_context import ArmContext
from normkit.study.corpus import next_token_loss, text_of_the_library, windows
from normkit.study.training_run import Batch, Observe, Recipe, TrainingRun
from normkit.study.transformer import Transformer, TransformerConfig


def transformer(context: ArmContext, /, **choices: Any) -> Transformer:
    """An untrained model; the settings "window", "width" and "layers" are its sizes unless the choices give them."""
    sizes = {"context": "window", "width": "width", "layers": "layers"}
    from_settings: dict[str, Any] = {
        name: context.integer(setting) for name, setting in sizes.items() if name not in choices
    }
    return Transformer(TransformerConfig(**from_settings, **choices), seed=context.seed)


def train_on_text(
    context: ArmContext,
    model: Transformer,
    recipe: Recipe,
    *,
    batch: int | None = None,
    text: bytes | None = None,
    observe: Observe | None = None,
) -> TrainingRun:
    """Train a model on windows of text as long as its context.

    Args:
        context: Of the arm; its seed decides the places of the windows.
        model: What to train.
        recipe: The choices.
        batch: Windows in a batch; the setting "batch" if None.
        text: What to train on; the training text of the standard library if None.
        observe: Values to record at each step.
    """
    batches = windows(
        text_of_the_library()[0] if text is None else text,
        batch=context.integer("batch") if batch is None else batch,
        window=model.config.context,
        seed=context.seed,
    )
    return context.train(model, recipe, batches, next_token_loss, observe=observe)


def text_batch(context: ArmContext, text: bytes, *, seed: int = 0) -> Batch:
    """One batch of windows of a text, on the context's device; the settings are "batch" and "window"."""
    (ids,) = next(windows(text, batch=context.integer("batch"), window=context.integer("window"), seed=seed))
    return (ids.to(context.device),)


def random_ids(context: ArmContext, vocabulary: int, *, rows: int, tokens: int) -> tuple[Tensor, torch.Generator]:
    """Token ids (rows, tokens + 1) of equal probability, and the generator that drew them."""
    generator = torch.Generator().manual_seed(context.seed)
    ids = torch.randint(vocabulary, (rows, tokens + 1), generator=generator)
    return ids.to(context.device), generator
