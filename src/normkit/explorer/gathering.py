"""Collects the rows of some tokens while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from normkit.identification.sites import NormSite
from normkit.measurement.observing import Listener
from normkit.measurement.running import Batch, token_mask
from normkit.measurement.sampling import evenly

DECODER = "decoder_"
"""What the names of a decoder's arguments begin with."""


class Gatherer(Listener):
    """Keeps the rows that enter some norms for every k-th token of a text; k grows with the text.

    Args:
        sites: The norms.
        most: Number of tokens at the end; up to twice as many are kept meanwhile.
        prefix: Prefix of the arguments that hold the tokens: "" or "decoder_".
        decode: Token id -> its name; tokens without ids are numbered from 1.

    Attributes:
        sites: The norms.
        counted: Tokens of the text so far.
        rows: Path -> rows (N, n) of the tokens kept, in their order; None where no axis is the tokens'.
    """

    def __init__(self, sites: Sequence[NormSite], most: int, prefix: str, decode: Callable[[int], str]) -> None:
        self.sites = sites
        self.counted = 0
        self.rows: dict[str, Tensor | None] = {site.path: torch.empty(0) for site in sites}
        self._most, self._prefix, self._decode = most, prefix, decode
        self._every = 1
        self._names: list[str] = []
        self._shape = (0, 0)
        self._places = torch.empty(0, 2, dtype=torch.int64)
        self._seen: dict[str, Tensor | None] = {}

    def begin(self, batch: Batch) -> None:
        """Choose tokens of the next batch."""
        batch = {key.removeprefix(self._prefix): value for key, value in batch.items() if key.startswith(self._prefix)}
        ids = batch.get("input_ids")
        first = next(iter(batch.values())) if ids is None else ids
        # A batch of single rows has one token per row.
        tokens = first.shape[1] if first.dim() > (2 if first.is_floating_point() else 1) else 1
        self._shape = (first.shape[0], tokens)
        mask = token_mask(batch)
        valid = torch.ones(self._shape, dtype=torch.bool) if mask is None else mask.cpu()
        places = valid.nonzero()
        while len(self._names) + len(places) / self._every > 2 * self._most:
            self._every *= 2
            self._keep(torch.arange(0, len(self._names), 2))
        start = -self.counted % self._every
        self._places = places[start :: self._every]
        if ids is None:
            self._names += [str(self.counted + number + 1) for number in range(start, len(places), self._every)]
        else:
            self._names += [self._decode(token) for token in ids.cpu()[self._places.unbind(1)].tolist()]
        self.counted += len(places)
        self._seen = {}

    def before_site(self, site: NormSite, x: Tensor) -> None:
        """Keep the rows of those tokens."""
        if site.path not in self._seen:
            rows = _rows(x.detach(), self._shape, self._places)
            self._seen[site.path] = None if rows is None else rows.cpu()

    def end(self) -> None:
        """Take over the rows of a batch that has passed through the model."""
        for path, kept in self.rows.items():
            rows = self._seen.get(path)
            if kept is None or rows is None:
                self.rows[path] = None
            else:
                self.rows[path] = torch.cat([kept, rows]) if len(kept) else rows

    def finish(self) -> list[str]:
        """Thin the rows to as many tokens as were asked for, and return the names of these."""
        self._keep(evenly(len(self._names), self._most))
        return self._names

    def _keep(self, indices: Tensor) -> None:
        self._names = [self._names[index] for index in indices.tolist()]
        self.rows = {path: rows if rows is None or not len(rows) else rows[indices] for path, rows in self.rows.items()}


def _rows(x: Tensor, shape: tuple[int, int], places: Tensor) -> Tensor | None:
    """The rows (N, n) of some tokens; of the first head if a token has several. None if no axis is that of tokens.

    Args:
        x: What enters a norm: (B, T, n), (B, T, heads, n), (B, heads, T, n) or (B * T, n).
        shape: B and T.
        places: Pairs (row of the batch, position), of shape (N, 2).
    """
    batch, tokens = shape
    row, position = places.to(x.device).unbind(1)
    leading = tuple(x.shape[:-1])
    if leading == (batch, tokens, tokens) and tokens > 1:
        # With as many heads as tokens, the two axes cannot be told apart.
        return None
    if leading[:2] == (batch, tokens):
        rows = x[row, position]
        while rows.dim() > 2:
            rows = rows[:, 0]
        return rows
    if len(leading) == 3 and (leading[0], leading[2]) == (batch, tokens):
        return x[row, 0, position]
    if leading == (batch * tokens,):
        return x[row * tokens + position]
    return None
