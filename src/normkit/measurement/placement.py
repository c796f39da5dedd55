"""One run of a model in which every block is replayed on scaled inputs: verdicts for blocks, roles for norms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from normkit.identification.sharding import local
from normkit.identification.sites import NormSite
from normkit.identification.tracing import first_tensor
from normkit.measurement.block_response import UNKNOWN, BlockResponse, BlockSweep, median_cosine
from normkit.measurement.blocks import BlockCall
from normkit.measurement.facts import Role
from normkit.measurement.observing import observed
from normkit.measurement.replaying import Replay, Replayer, ReplayError

# A norm at the end of a stack reads what the last block returned, up to a factor.
_SAME_DIRECTION = 0.99


def sweep(
    model: nn.Module, sites: Sequence[NormSite], blocks: Sequence[BlockCall], run: Callable[[], object]
) -> tuple[tuple[BlockSweep, ...], dict[str, Role], str | None]:
    """Run the model once; where a block is first called, replay it on scaled inputs.

    16-bit blocks are replayed on float32 copies of their parameters, one block at a time; blocks whose
    branch is lost in rounding, on float64 copies. The model and the random number generators are left as
    they were, also if `run` raises.

    Args:
        model: The model.
        sites: The norms of the model.
        blocks: The blocks of the model.
        run: Calls the model on a small input, without a cache of keys and values.

    Returns:
        One sweep a block; the role of each site by path; the path of the norm after the last block, or None.
    """
    sweeper = _Sweeper(sites)
    parents = [path for path, _ in model.named_modules()]
    with torch.no_grad(), observed(model, sites, blocks, parents, sweeper):
        run()
    outside, final_norm = _outside_blocks(sweeper.visits)
    unseen: dict[str, Role] = dict.fromkeys((site.path for site in sites), "unknown")
    return (
        tuple(sweeper.swept(block) for block in blocks),
        unseen | outside | sweeper.roles,
        final_norm,
    )


@dataclass(frozen=True, kw_only=True)
class _Visit:
    """A block was called (path ""), or a norm outside the blocks."""

    path: str = ""
    """Path of the norm."""
    block_list: str | None = None
    """Path of the list that the block is a member of."""
    reads_stream: bool = False
    """The norm reads what the last block returned."""
    reads_part: bool = False
    """It reads something of the stream's width and another shape, such as one token a row."""


class _Sweeper(Replayer):
    """Replays each block at its first call, and notes which norms are called between them."""

    def __init__(self, sites: Sequence[NormSite]) -> None:
        super().__init__()
        self.sweeps: dict[str, BlockSweep] = {}
        self.roles: dict[str, Role] = {}
        self.visits: list[_Visit] = []
        self._sites = {site.path: site for site in sites}
        self._stream: Tensor | None = None
        self._entered: Tensor | None = None
        self._changes: dict[str, tuple[float, float]] = {}
        self._in_block = False
        self._returned: tuple[int, Tensor, int] | None = None
        self._calls: Counter[int] = Counter()
        self._following: Counter[int] = Counter()

    def swept(self, block: BlockCall) -> BlockSweep:
        """The observations of one block."""
        share, cosine = self._changes.get(block.path, (math.nan, math.nan))
        calls = {self._following[block.index], self._calls[block.index], self._calls[block.index - 1]}
        follows = len(calls) == 1 and 0 not in calls
        return replace(self.sweeps.get(block.path, UNKNOWN), branch_share=share, cosine=cosine, follows=follows)

    def before_block(self, block: BlockCall, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self.current is not None:
            return
        x = first_tensor(args, kwargs)
        self._calls[block.index] += 1
        if x is not None and self._returned is not None and not x.is_inference():
            before, y, version = self._returned
            self._following[block.index] += before == block.index - 1 and y is x and x._version == version
        self._in_block = True
        self.visits.append(_Visit(block_list=block.path.rpartition(".")[0]))
        # Only a module can be called again.
        if block.path in self.sweeps or block.leaves is not None:
            return
        self.sweeps[block.path] = UNKNOWN
        # The block may overwrite its input.
        self._entered = None if x is None else local(x).detach().to("cpu", torch.float64, copy=True)
        rms = 0.0 if x is None else float(local(x).cpu().double().square().mean(-1).sqrt().nanmedian())
        if not 0 < rms < math.inf:
            return
        unit = max(1.0, 1.0 / rms)

        def read(dtype: torch.dtype) -> bool:
            def replay(scale: float, altered: NormSite | None, factor: float) -> Replay:
                return self.replay(
                    block.module, args, kwargs, scale=scale * unit, altered=altered, factor=factor, dtype=dtype
                )

            fingerprint = BlockResponse(self._sites, replay)
            self.sweeps[block.path], roles = fingerprint.read()
            self.roles = self.roles | roles
            return fingerprint.is_resolved

        # A branch that is lost in float32's rounding may be found in float64; not every block can be widened so.
        with suppress(ReplayError):
            read(torch.float32) or read(torch.float64)

    def after_block(self, block: BlockCall, y: Tensor) -> None:
        if self.current is not None:
            return
        self._returned = None if y.is_inference() else (block.index, y, y._version)
        y = local(y)
        self._in_block, self._stream = False, y
        if self._entered is not None and self._entered.shape == y.shape:
            self._changes.setdefault(block.path, _change(self._entered, y))
        self._entered = None

    def before_site(self, site: NormSite, x: Tensor) -> None:
        super().before_site(site, x)
        x = local(x)
        if self.current is None and not self._in_block:
            stream = self._stream
            same_shape = stream is not None and stream.shape == x.shape
            self.visits.append(
                _Visit(
                    path=site.path,
                    reads_stream=stream is not None and same_shape and median_cosine(x, stream) > _SAME_DIRECTION,
                    reads_part=stream is not None and not same_shape and stream.shape[-1] == x.shape[-1],
                )
            )


def _change(x: Tensor, y: Tensor) -> tuple[float, float]:
    """The change of the stream by a block: |y - x| / |x| and the cosine between both, of the median row."""
    moved = y.cpu().double() - x
    shares = torch.linalg.vector_norm(moved, dim=-1) / torch.linalg.vector_norm(x, dim=-1)
    return float(shares.nanmedian()), median_cosine(x, y)


def _outside_blocks(visits: Iterable[_Visit]) -> tuple[dict[str, Role], str | None]:
    """Roles of the norms outside the blocks, and the norm after the last block."""
    order = list(visits)
    roles: dict[str, Role] = {}
    final_norm: str | None = None
    before: str | None = None
    for index, visit in enumerate(order):
        if not visit.path:
            before = visit.block_list
            continue
        after = next((later.block_list for later in order[index:] if not later.path), None)
        role: Role = "unknown"
        if before is None:
            role = "embedding" if after is not None else "unknown"
        elif after is None and final_norm is None and (visit.reads_stream or visit.reads_part):
            role, final_norm = "final", visit.path
        elif after not in (None, before):
            # Between two stacks: the end of the first, or the beginning of the second.
            role = "final" if visit.reads_stream else "embedding"
        roles.setdefault(visit.path, role)
    return roles, final_norm
