"""What the norms of a model read and feed, watched in one run: parallel branches, queries and keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from normkit.identification.sites import NormSite
from normkit.identification.tracing import Trace, first_tensor
from normkit.measurement.hooks import Listener
from normkit.measurement.layout import BlockCall

# So few rows may have like lengths by chance.
_FEW_ROWS = 4
# (batch, heads, tokens, features), or the last two of attention's scores.
_HEADS_AXES = 4


class Wiring(Listener):
    """What is read where, in one run of the model.

    Attributes:
        bare: Paths of the norms that read their block's own input, bit for bit.
        query_key: How queries and keys are normalized, each way once, in forward order.
    """

    def __init__(self) -> None:
        self.bare: set[str] = set()
        self.query_key: dict[str, None] = {}
        self._stream: Tensor | None = None
        self._before: list[tuple[NormSite, Tensor]] = []

    def before_block(self, _block: BlockCall, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._stream = first_tensor(args, kwargs)

    def before_site(self, site: NormSite, x: Tensor) -> None:
        stream = self._stream
        if stream is not None and stream.shape == x.shape and torch.equal(x, stream):
            self.bare.add(site.path)

    def after_site(self, site: NormSite, y: Tensor, _given: object) -> None:
        self._before.append((site, y))

    def at_attention(self, parent: str, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        inside = [(site, y) for site, y in self._before if f"{site.parent}.".startswith(f"{parent}.")]
        self._before = []
        heads = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)][:2]
        for site, y in inside:
            if function == "sdpa" and any(has_rows_of(y, each) for each in heads):
                self.query_key["per head" if site.shape[0] == heads[0].shape[-1] else "all heads"] = None
            elif (
                function == "sdpa"
                and y.dim() == 3
                and self._stream is not None
                and len(y) == len(self._stream)
                and y.shape[-1] != self._stream.shape[-1]
            ):
                self.query_key["latent"] = None
            elif function == "softmax" and y.dim() == _HEADS_AXES:
                self.query_key["per head"] = None


def has_rows_of(y: Tensor, heads: Tensor) -> bool:
    """Whether the rows of queries or keys are those of y cut into heads, turned and scaled: they keep their lengths."""
    width = heads.shape[-1]
    if y.shape[-1] % width or not _FEW_ROWS * width < y.numel() <= heads.numel():
        return False
    lengths, expected = (torch.linalg.vector_norm(rows.reshape(-1, width), dim=-1).sort().values for rows in (heads, y))
    # Keys may be repeated for groups of queries.
    lengths = lengths[:: len(lengths) // len(expected)] if len(expected) else lengths
    return len(lengths) == len(expected) and torch.allclose(
        lengths / lengths.mean(), expected / expected.mean(), rtol=1e-3
    )


def is_parallel(block: BlockCall, pre: set[str], bare: set[str], called: Trace) -> bool:
    """Whether attention and another branch both read the block's own input: every norm before a branch does."""
    # The softmax of a router has no heads.
    attending = [
        call.parent
        for call in called.functions
        if call.function in ("sdpa", "softmax") and len(call.input_shape) == _HEADS_AXES
    ]
    branches = {
        f"{block.path}.{name}"
        for name, child in block.module.named_children()
        if any(parameter.dim() > 1 for parameter in child.parameters())
    }
    attentions = {branch for branch in branches if any(f"{path}.".startswith(f"{branch}.") for path in attending)}
    return bool(attentions) and attentions < branches and pre <= bare
