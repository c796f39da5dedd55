"""A transformer of one's own and a training loop, run with and without a watch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normkit.measurement.training import Series
from normkit.watching.watcher import Watch, watch

VOCABULARY = 20


class Attention(nn.Module):
    """Queries and keys are normalized by calls of a function; `in_modules`: queries by a module."""

    def __init__(self, width: int, heads: int, *, in_modules: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm = nn.RMSNorm(width // heads) if in_modules else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        shape = (batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        q = F.rms_norm(q, q.shape[-1:]) if self.q_norm is None else self.q_norm(q)
        k = F.rms_norm(k, k.shape[-1:])
        if mask is not None:
            mask = mask[:, None, None, :].bool()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, **options: bool) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width, heads, **options)
        self.norm_2 = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x), mask))
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    """Sites: each block's norm_1, two rms_norm calls and norm_2, then norm."""

    def __init__(self, blocks: int = 2, width: int = 16, heads: int = 2, **options: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, **options) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        self.checkpointing: str = "none"

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointing == "none" or not self.training:
                x = block(x, attention_mask)
            else:
                x = checkpoint(block, x, attention_mask, use_reentrant=self.checkpointing == "re-entrant")
        return self.head(self.norm(x))


class Run:
    """A model, an optimizer and what comes of training it.

    Attributes:
        losses: One a step.
        watch: The watch, or None.
        said: Its lines.
    """

    def __init__(self, build: Callable[[], nn.Module] = Transformer, *, rate: float = 1e-2) -> None:
        torch.manual_seed(0)
        self.model: Any = build().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.losses: list[float] = []
        self.said: list[str] = []
        self.watch: Watch | None = None
        self.generator = torch.Generator().manual_seed(1)

    def batch(self, rows: int = 2, tokens: int = 9) -> Tensor:
        return torch.randint(0, VOCABULARY, (rows, tokens), generator=self.generator)

    def loss(self, call: Callable[..., Tensor], batch: Tensor, **arguments: Tensor) -> Tensor:
        logits = call(batch[:, :-1], **arguments)
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def step(
        self,
        call: Callable[..., Tensor] | None = None,
        batch: Tensor | None = None,
        *,
        after_backward: Callable[[Run], object] = lambda _: None,
        after_tell: Callable[[Run], object] = lambda _: None,
        scaler: torch.amp.GradScaler | None = None,
        **arguments: Tensor,
    ) -> None:
        """One step of the plainest loop; two functions are called before and after the watch is told of it."""
        loss = self.loss(self.model if call is None else call, self.batch() if batch is None else batch, **arguments)
        self.optimizer.zero_grad()
        (loss if scaler is None else scaler.scale(loss)).backward()
        after_backward(self)
        self.tell(loss)
        after_tell(self)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()

    def tell(self, loss: Any) -> None:
        if self.watch is not None:
            self.watch.step(loss)
        self.losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss))

    def go(
        self,
        *,
        watched: bool = True,
        steps: int = 4,
        body: Callable[[Run], None] | None = None,
        given: nn.Module | None = None,
        optimizer: Any = "its own",
        **options: Any,
    ) -> Run:
        """Train, with or without a watch; `body` does one step."""
        body = body or Run.step
        if not watched:
            for _ in range(steps):
                body(self)
            return self
        options = {"every": 2, "say": self.said.append, **options}
        optimizer = self.optimizer if optimizer == "its own" else optimizer
        with watch(self.model if given is None else given, optimizer, **options) as self.watch:
            for _ in range(steps):
                body(self)
        return self

    @property
    def state(self) -> list[Tensor]:
        """Everything that a watch must not change: weights, buffers, gradients, moments, losses and random numbers."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        losses = torch.tensor(self.losses, dtype=torch.float64)
        return [*self.model.state_dict().values(), *gradients, *moments, losses, torch.get_rng_state()]


def is_of_data(series: Series) -> bool:
    """Whether a series is of what the model was fed."""
    return series.quantity.startswith(("batch", "label", "id "))


def assert_same(one: Run, other: Run) -> None:
    """Both runs ended in the same state, bit by bit."""
    assert len(one.state) == len(other.state)
    for left, right in zip(one.state, other.state, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def fingerprint(model: nn.Module) -> Sequence[object]:
    """What a module holds beside its parameters: hooks and attributes."""
    return [
        (path, sorted(module.__dict__), len(module._forward_hooks), len(module._forward_pre_hooks), module.training)
        for path, module in model.named_modules()
    ]
