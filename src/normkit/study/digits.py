"""Handwritten digits without a download: the 1,797 images of 8 x 8 pixels that scikit-learn contains."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.errors import InputError
from normkit.study.training_run import Batch

CLASSES = 10
SIDE = 8
"""Pixels on each side of an image."""

_HELD_OUT = 450


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Images and the digits on them."""

    training: Tensor
    """Images (1347, 8, 8), float32, of mean 0 and standard deviation 1 over all their pixels."""
    training_labels: Tensor
    """Their digits, int64."""
    held_out: Tensor
    """Images (450, 8, 8), shifted and scaled like the training images."""
    held_out_labels: Tensor
    """Their digits."""


@cache
def digits() -> Digits:
    """The images in the order of the file: the last 450 are held out.

    Raises:
        InputError: If scikit-learn is not installed.

    Source:
        Alpaydin & Kaynak 1998, UCI machine learning repository, the test part of "optical recognition of handwritten
        digits", as `sklearn.datasets.load_digits` has it.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError('the digits need scikit-learn, which is not installed: pip install "normkit[study]"') from None
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    seen = images[:-_HELD_OUT]
    images = (images - seen.mean()) / seen.std(correction=0)
    return Digits(
        training=images[:-_HELD_OUT],
        training_labels=labels[:-_HELD_OUT],
        held_out=images[-_HELD_OUT:],
        held_out_labels=labels[-_HELD_OUT:],
    )


def digit_batches(data: Digits, *, batch: int, seed: int) -> Iterator[Batch]:
    """Endless batches of training images (batch, 8, 8) and labels (batch,), each image at most once in a batch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randperm(len(data.training), generator=generator)[:batch]
        yield data.training[chosen], data.training_labels[chosen]


def digit_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy, in nats, of the labels under the logits that a model gives for the images."""
    images, labels = batch
    return F.cross_entropy(model(images).float(), labels)


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well a model reads images."""

    loss: float
    """Mean cross-entropy in nats."""
    error: float
    """Share of images whose digit is not the likeliest one, in percent."""


@torch.no_grad()
def digit_score(model: nn.Module, images: Tensor, labels: Tensor, *, batch: int | None = None) -> Score:
    """Loss and error of a model in the mode it is in, over images taken `batch` at a time.

    An incomplete last batch is left out: in training mode BatchNorm would see fewer images in it.

    Args:
        model: From images (N, 8, 8) to logits (N, 10).
        images: Images.
        labels: The digits on them.
        batch: Images at a time; all at once if None.
    """
    parameter = next(model.parameters())
    batch = len(images) if batch is None else batch
    loss, wrong, count = 0.0, 0, 0
    for start in range(0, len(images) - batch + 1, batch):
        part = images[start : start + batch].to(parameter.device, parameter.dtype)
        goal = labels[start : start + batch].to(parameter.device)
        logits = model(part).float()
        loss += F.cross_entropy(logits, goal, reduction="sum").item()
        wrong += int((logits.argmax(-1) != goal).sum())
        count += batch
    return Score(loss=loss / count if count else math.nan, error=100 * wrong / count if count else math.nan)
