"""Training runs of networks with batch norms and adaptive norms, watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import words as w
from kit import batch_norms, case
from material import digits
from oddities import Adaptive, patches
from small import plain


@dataclass
class Run:
    """A loop to watch: model, optimizer, batches (arguments of the model and the loss of what it gives)."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], tuple]
    steps: int = 40
    every: int = 10
    before: Callable[[int], None] = lambda step: None
    loss: Callable = nn.functional.cross_entropy


def labelled(size: int, start: int = 0) -> Callable[[int], tuple]:
    images, labels = digits()

    def batch(step: int) -> tuple:
        at = start + (step * size) % 1400
        return (images[at : at + size],), labels[at : at + size]

    return batch


def run(name: str, truth: str, *say: str, sort: str = "fault"):
    return case("runs", name, "watch", truth, *say, sort=sort)


def adam(model: nn.Module, rate: float = 2e-3, decay: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=decay)


def norm_paths(model: nn.Module) -> tuple[str, ...]:
    return tuple(batch_norms(model))


@run("healthy batch norm", "a healthy run of 48 images a step", sort="clean")
def _(rng, made):
    model = plain()
    made.model = Run(model, adam(model), labelled(48))


@run(
    "healthy frozen",
    "fine-tuning with statistics and affine of all batch norms frozen, as meant in detection",
    sort="clean",
)
def _(rng, made):
    from dress import kept, train_on_digits

    model = kept("cnn", 1, plain, lambda m: train_on_digits(m, 1, 150))
    for norm in batch_norms(model).values():
        norm.weight.requires_grad_(False)
        norm.bias.requires_grad_(False)

    def still(step: int) -> None:
        for norm in batch_norms(model).values():
            norm.eval()

    made.model = Run(model, adam(model, 5e-4), labelled(48), before=still)


@run(
    "two images",
    "two images a step in a batch norm at 8 x 8 pixels and one after pooling: statistics of next to nothing",
    w.SMALL,
    w.STATISTICS,
)
def _(rng, made):
    head = [nn.Flatten(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)]
    model = nn.Sequential(*list(plain())[:13], *head)
    made.model, made.where = Run(model, adam(model), labelled(2)), ("15",)


@run(
    "Keras' momentum",
    "momentum 0.99 for 0.01: the running statistics are those of the last batch",
    w.MOMENTUM,
    w.STATISTICS,
)
def _(rng, made):
    model = plain()
    for norm in batch_norms(model).values():
        norm.momentum = 0.99
    made.model, made.where = Run(model, adam(model), labelled(48)), norm_paths(model)


@run(
    "momentum 0",
    "momentum is 0, so the running statistics never leave 0 and 1, which evaluation uses",
    w.MOMENTUM,
    w.STATISTICS,
)
def _(rng, made):
    model = plain()
    for norm in batch_norms(model).values():
        norm.momentum = 0.0
    made.model, made.where = Run(model, adam(model), labelled(48)), norm_paths(model)


@run(
    "decay on gamma",
    "weight decay 0.5 at rate 0.02 acts on gamma and beta, too, which shrink together",
    w.DECAY,
    w.GAIN,
)
def _(rng, made):
    model = plain()
    made.model, made.where = Run(model, adam(model, 2e-2, 2.0), labelled(48)), norm_paths(model)


@run(
    "affine frozen, statistics live",
    "fine-tuning freezes gamma and beta, while the statistics go on following another dataset",
    w.FROZEN,
    w.STATISTICS,
)
def _(rng, made):
    from dress import kept, train_on_digits

    model = kept("cnn", 1, plain, lambda m: train_on_digits(m, 1, 150))
    for norm in batch_norms(model).values():
        norm.weight.requires_grad_(False)
        norm.bias.requires_grad_(False)
    images, labels = digits()
    optimizer = adam(model, 5e-4)
    made.model = Run(model, optimizer, lambda k: ((-images[48 * k % 1400 :][:48] * 0.5,), labels[48 * k % 1400 :][:48]))
    made.where = norm_paths(model)


@run(
    "statistics frozen, affine live",
    "fine-tuning on inverted images keeps the old statistics, while gamma and beta train",
    w.FROZEN,
    w.STATISTICS,
)
def _(rng, made):
    from dress import kept, train_on_digits

    model = kept("cnn", 1, plain, lambda m: train_on_digits(m, 1, 150))
    images, labels = digits()

    def still(step: int) -> None:
        for norm in batch_norms(model).values():
            norm.eval()

    given = lambda k: ((-images[48 * k % 1400 :][:48] * 3,), labels[48 * k % 1400 :][:48])  # noqa: E731
    made.model, made.where = Run(model, adam(model, 5e-4), given, before=still), norm_paths(model)


@run(
    "behind dropout",
    "dropout of 0.6 stands before a batch norm: what it stores is not what evaluation gives",
    w.DROPOUT,
    w.STATISTICS,
)
def _(rng, made):
    model = plain(0.6)
    made.model, made.where = Run(model, adam(model), labelled(48)), ("9", "7")


class OverTime(nn.Module):
    """Convolutions with batch norm over the frames of padded sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(8, 32, 3, padding=1), nn.BatchNorm1d(32)
        self.second, self.norm2, self.head = nn.Conv1d(32, 32, 3, padding=1), nn.BatchNorm1d(32), nn.Linear(32, 10)

    def forward(self, frames):
        x = torch.relu(self.norm(self.first(frames)))
        return self.head(torch.relu(self.norm2(self.second(x))).mean(-1))


@run(
    "padding in the statistics",
    "sequences of 8 frames are padded with zeros to 64, and the zeros enter the batch norm's statistics",
    w.PADDING,
    w.STATISTICS,
)
def _(rng, made):
    model = OverTime()
    images, labels = digits(8)

    def batch(step: int) -> tuple:
        rows = torch.zeros(32, 8, 64)
        rows[:, :, :8] = images[32 * step % 1400 :][:32, 0] + 1.5
        return (rows,), labels[32 * step % 1400 :][:32]

    made.model, made.where = Run(model, adam(model), batch), ("norm", "norm2")


@run(
    "repeated samples",
    "each batch is one image 32 times (a sampler's bug): the statistics are those of one image",
    "repeat|same|identical|copies|alike",
    w.DATA,
)
def _(rng, made):
    model = plain()
    images, labels = digits()
    made.model = Run(
        model, adam(model), lambda k: ((images[k : k + 1].repeat(32, 1, 1, 1),), labels[k : k + 1].repeat(32))
    )
    made.where = (*norm_paths(model), "input", "")


@run(
    "one poisoned batch",
    "at step 17 a batch comes 1e4 times too large and spoils every running statistic",
    w.STATISTICS,
    w.DATA,
    "step 17",
)
def _(rng, made):
    model = plain()
    usual = labelled(48)

    def batch(step: int) -> tuple:
        (images,), labels = usual(step)
        return (images * (1e4 if step == 17 else 1),), labels

    made.model, made.where = Run(model, adam(model), batch), (*norm_paths(model), "0", "input", "")


@run(
    "gamma never leaves 0", "the last gamma starts at 0, as meant, but is not given to the optimizer", w.FROZEN, w.DEAD
)
def _(rng, made):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
            self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
            nn.init.zeros_(self.bn2.weight)

        def forward(self, x):
            return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))

    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(),
        Block(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    index = rng.choice([3, 4])
    held = {id(p) for p in model[index].bn2.parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if id(p) not in held], lr=2e-3)
    made.model, made.where = Run(model, optimizer, labelled(48)), (f"{index}.bn2", str(index))


@run(
    "modulation left out",
    "a small DiT: the layers that make shift, scale and gate are not given to the optimizer and stay 0",
    w.FROZEN,
    w.MODULATION,
    w.DEAD,
)
def _(rng, made):
    model = Adaptive()
    held = {id(p) for p in model.modulations.parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if id(p) not in held], lr=2e-3)

    def batch(step: int) -> tuple:
        rows, time = patches(16), torch.rand(16, generator=torch.Generator().manual_seed(step))
        noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(step))
        return (rows * (1 - time[:, None, None]) + noise * time[:, None, None], time), noise - rows

    made.model = Run(model, optimizer, batch, loss=nn.functional.mse_loss)
    made.where = tuple(f"modulations.{k}" for k in range(3))


@run("healthy adaptive norms", "the same with all parameters trained: gates leave 0 by themselves", sort="clean")
def _(rng, made):
    model = Adaptive()

    def batch(step: int) -> tuple:
        generator = torch.Generator().manual_seed(step)
        rows, time = patches(16), torch.rand(16, generator=generator)
        noise = torch.randn(rows.shape, generator=generator)
        return (rows * (1 - time[:, None, None]) + noise * time[:, None, None], time), noise - rows

    made.model = Run(model, adam(model, 1e-3), batch, loss=nn.functional.mse_loss)
