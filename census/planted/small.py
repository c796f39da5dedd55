"""A small convolutional network in one's own code, trained on the digits: how statistics come to be wrong."""

from __future__ import annotations

import torch
from torch import nn

import words as w
from dress import kept, train_on_digits
from kit import Subject, batch_norms, case, clean, draw, subject
from material import digits, pixels


def plain(drop: float = 0.0) -> nn.Sequential:
    """Three convolutions with batch norm, a head; dropout behind the second activation if asked for."""
    layers, wide = [], [3, 16, 32, 32]
    for index in range(3):
        layers += [
            nn.Conv2d(wide[index], wide[index + 1], 3, 2 if index else 1, 1, bias=False),
            nn.BatchNorm2d(wide[index + 1]),
            nn.ReLU(),
        ]
        layers += [nn.Dropout(drop if index == 1 else 0.0)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


@subject("cnn")
def cnn(rng, seed):
    model = kept("cnn", seed, plain, lambda m: train_on_digits(m, seed, 150))
    return Subject(model, [pixels(48), pixels(48, 1600)], sites=0, batch_norms=3)


def settle(model: nn.Module, images: torch.Tensor, steps: int = 40) -> None:
    """Let the running statistics follow these images, as further training on them does."""
    model.train()
    with torch.no_grad():
        for _ in range(steps):
            model(images)
    model.eval()


clean("cnn", "code")


@case(
    "cnn",
    "sorted data",
    "python",
    "the last epoch was sorted by label, so the statistics are those of one digit",
    w.STATISTICS,
)
def _(rng, made):
    images, labels = digits()
    settle(made.model, images[:1500][labels[:1500] == rng.randrange(10)][:64])
    made.where = tuple(batch_norms(made.model))


@case(
    "cnn",
    "inverted images",
    "python",
    "the statistics are those of the pretraining's images, black on white",
    w.STATISTICS,
)
def _(rng, made):
    settle(made.model, -digits()[0][:64])
    made.where = tuple(batch_norms(made.model))


@case(
    "cnn",
    "half of the batch empty",
    "code",
    "three quarters of each batch of the training were blank images, kept to fill it",
    w.STATISTICS,
)
def _(rng, made):
    images = digits()[0][:64].clone()
    images[16:] = -1
    settle(made.model, images)
    made.where = tuple(batch_norms(made.model))


@case(
    "cnn",
    "behind dropout",
    "code",
    "dropout of 0.7 stands before a batch norm, whose stored variance is that of training",
    w.DROPOUT,
    w.STATISTICS,
)
def _(rng, made):
    class Own(nn.Module):
        def __init__(self, body: nn.Sequential) -> None:
            super().__init__()
            self.body = body

        def forward(self, x):
            return self.body(x)

    body = plain(0.7)
    body.load_state_dict(made.model.state_dict())
    made.model = Own(body)
    torch.manual_seed(rng.randrange(10000))
    settle(made.model, digits()[0][:256])
    made.where = ("body.9", "body.7")


@case(
    "cnn",
    "no statistics kept",
    "code",
    "one batch norm has track_running_stats=False, so it depends on the batch when used",
    w.LIVE,
    w.STATISTICS,
)
def _(rng, made):
    path = draw(rng, batch_norms(made.model))
    norm = made.model.get_submodule(path)
    norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    made.where = (path,)
