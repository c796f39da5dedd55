"""Short training runs on real text, in which a fault strikes or does not."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cases import Draw, Run
from .material import text


class Text:
    """Windows of bytes of real text, the same sequence of windows for the same draw."""

    def __init__(self, draw: Draw, rows: int = 4, length: int = 48) -> None:
        self.data = torch.tensor(list(text(draw, 20000).encode()))
        self.generator = torch.Generator().manual_seed(draw.randrange(2**31))
        self.rows, self.length = rows, length

    def __call__(self, _step: int) -> Tensor:
        starts = torch.randint(len(self.data) - self.length - 1, (self.rows, 1), generator=self.generator)
        return self.data[starts + torch.arange(self.length + 1)] % 256


def logits_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def language_loss(model: nn.Module, batches: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """Next-byte cross-entropy."""

    def loss(step: int) -> Tensor:
        ids = batches(step)
        logits = logits_of(model(input_ids=ids[:, :-1])).float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return loss


def matrices_and_rest(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters with two axes and more, and the others: gains and biases."""
    every = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [p for p in every if p.ndim > 1], [p for p in every if p.ndim < 2]


def adamw(model: nn.Module, rate: float = 1e-3, decay: float = 0.01, **options: Any) -> torch.optim.AdamW:
    """AdamW as it should be: no decay on gains and biases."""
    matrices, rest = matrices_and_rest(model)
    groups = [{"params": matrices, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, **options)


def run(
    draw: Draw,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    places: Iterable[str] = (),
    steps: int = 0,
    batches: Callable[[int], Tensor] | None = None,
    **options: Any,
) -> Run:
    """A run of a language model: 30 to 60 steps of AdamW, unless told otherwise."""
    model.train()
    return Run(
        model,
        optimizer or adamw(model),
        options.pop("loss", None) or language_loss(model, batches or Text(draw)),
        steps or draw.randint(30, 60),
        list(places),
        every=options.pop("every", draw.choice([5, 10])),
        **options,
    )


def at(step: int, action: Callable[[], None]) -> Callable[[int], None]:
    """Something that happens before one step."""
    return lambda now: action() if now == step else None


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
