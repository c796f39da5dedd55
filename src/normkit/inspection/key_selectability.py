"""The keys of one text that a query could select, in each head, by products and linear programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import InputError
from normkit.geometry.selection import selectable
from normkit.identification.tracing import Trace
from normkit.measurement.attention import queries_and_keys
from normkit.measurement.hooks import Listener, observed
from normkit.measurement.layout import BlockCall, block_of
from normkit.measurement.quantities import KeySelection
from normkit.measurement.sampling import evenly

_KEYS = 256
_SAMPLED = 16
# A linear program takes 0.6 microseconds for each key and feature: with 16 keys a head, these are some ten seconds if
# every key of every head needs one. Most do not.
_WORK = 1 << 20


@contextmanager
def key_selections(
    model: nn.Module,
    trace: Trace,
    blocks: Sequence[BlockCall],
    batch: int,
    row: int,
    mask: Tensor | None,
    progress: Callable[[int, int], None],
) -> Iterator[list[KeySelection]]:
    """Judge 16 keys a head of each scaled_dot_product_attention call of the forward pass inside, as it is made.

    How many heads are tried is a constant over keys times features, spread evenly over the calls. Causal masks
    count for nothing: a key is judged among all keys of the text.

    Args:
        model: The model; it is left as it was, also after an exception.
        trace: One forward pass of it: tells which modules call attention.
        blocks: The blocks of the model.
        batch: Texts of the forward pass.
        row: The text to judge, by its place among them.
        mask: Its token mask (T,), or None where all count.
        progress: Called with the calls judged and the calls in all.

    Yields:
        A list that is filled with one entry for each call of which a head was tried; it stays empty where SciPy is not
        installed.
    """
    calls = [call.parent for call in trace.functions if call.function == "sdpa"]
    if not calls or find_spec("scipy") is None:
        yield []
        return
    judge = _Judge(len(calls), blocks, batch, row, mask, progress)
    with observed(model, [], [], calls, judge):
        yield judge.judged


class _Judge(Listener):
    """Judges the keys of every call as it is made, so that none are kept."""

    def __init__(
        self,
        calls: int,
        blocks: Sequence[BlockCall],
        batch: int,
        row: int,
        mask: Tensor | None,
        progress: Callable[[int, int], None],
    ) -> None:
        self.judged: list[KeySelection] = []
        self._calls, self._blocks, self._progress = calls, blocks, progress
        self._batch, self._row = batch, row
        self._valid = None if mask is None else mask.cpu().nonzero().flatten()
        self._tokens = None if mask is None else len(mask)
        self._entered: tuple[str, Tensor | None] = ("", None)
        self._heard = 0

    def before_parent(self, path: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        # Where there are several, as in cross-attention, the keys may be read from another than the first.
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        rows = [x for x in given if x.is_floating_point() and x.dim() == 3]
        self._entered = (path, self._of_text(rows[0][:, None]) if len(rows) == 1 else None)

    def at_attention(self, parent: str, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if function != "sdpa":
            return
        self._progress(self._heard, self._calls)
        place, self._heard = self._heard, self._heard + 1
        call = queries_and_keys(args, kwargs)
        keys = None if call is None else self._of_text(call.key)
        if keys is None:
            return
        count, features = keys.shape[1:]
        path, rows = self._entered
        fits = path == parent and rows is not None and rows.shape[1] == count
        chosen = evenly(len(keys), self._quota(place, count * features))
        shares = [(head, _share(keys[head])) for head in chosen.tolist()]
        if not shares:
            return
        self.judged.append(
            KeySelection(
                path=parent,
                block=block_of(parent, self._blocks),
                keys=count,
                sampled=min(_SAMPLED, count),
                before=_share(rows[0]) if fits and rows is not None else None,
                key_heads=len(keys),
                heads=tuple((head, share) for head, share in shares if share is not None),
            )
        )

    def _of_text(self, x: Tensor) -> Tensor | None:
        """The text's keys of (B, H, S, d), at most 256: (H, T, d) in float64 on the CPU; None if the mask misfits."""
        if x.shape[0] != self._batch or (self._tokens is not None and x.shape[2] != self._tokens):
            return None
        valid = torch.arange(x.shape[2]) if self._valid is None else self._valid
        return x[self._row][:, valid[:_KEYS].to(x.device)].detach().cpu().double() if len(valid) else None

    def _quota(self, place: int, size: int) -> int:
        """Heads to try of the call at this place, so that those of all calls are `_WORK` at most."""
        heads = max(1, _WORK // size)
        return (place + 1) * heads // self._calls - place * heads // self._calls


def _share(keys: Tensor) -> float | None:
    """Share of sampled keys (T, d) that are selectable; None if one is not finite or not to be judged."""
    # A key that recurs is the same answer to a query wherever it stands.
    distinct, places = torch.unique(keys, dim=0, return_inverse=True)
    if distinct.shape[1] > len(distinct):
        # Coordinates in the span of the keys are fewer than features, and all products stay as they are.
        distinct = torch.linalg.qr(distinct.T, mode="r").R.T
    try:
        found = selectable(distinct, places[evenly(len(keys), _SAMPLED)])
    except InputError:
        return None
    return float(found.double().mean())
