"""Finds the placement of a block's norms from its outputs at two scales of its stream.

A norm forgets the scale of its input, and a residual connection keeps it. So at a large scale a the output
f(a x) grows with a where the stream runs past the norms, and stands still where one sits in its way; the
branch f(a x) - a x grows only where no norm sits on it. The role of a single norm shows if its output is set to 0.

    wiring                          f(a x)          f(a x) - a x    norms
    pre                             grows           stands still    read the stream
    peri                            grows           stands still    read it, and end the branches
    output-only                     grows           stands still    end the branches
    in-branch                       grows           stands still    read what a layer made of the stream
    none                            grows           grows           none
    post                            stands still    grows           the stream goes through them, last through one
    residual-after-norm (a fault)   stands still    grows           the stream goes through one, then is added to

The first block of a stack may normalize the embeddings as they enter, as in RWKV: its wiring is then what the table
says of the multiples of what leaves that norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from normkit.identification.sharding import local
from normkit.identification.sites import NormSite
from normkit.identification.state import hooked
from normkit.measurement.facts import Placement, Role

if TYPE_CHECKING:
    from normkit.measurement.layout import BlockCall

# Multiples of the stream, for a stream with a root mean square of at least 1: far above any eps and norm output.
_SMALL, _LARGE = 100.0, 1000.0
# Root mean squares of rows as far apart, still above any usual eps, at which tanh is nearly linear.
_SHORT = 0.02, 0.2
# A slope is near 0, or near 1 or more: a product of two branches, as in a gated MLP, has 2.
_STANDS_STILL, _GROWS = 0.25, 0.75
_SAME_DIRECTION = 0.99
# Silencing a norm that is added to the stream takes its output away; what follows reacts a little.
_ADDED = 0.9
# Spread of the rows' lengths behind a norm: eps once gain and bias are undone, rounding where no norm is known.
_UNDONE_SPREAD, _RAW_SPREAD = 1e-2, 1e-4
# Relative to the larger number, differences below this are rounding.
_ROUNDINGS = {torch.float32: 1e-6, torch.float64: 1e-14}


@dataclass(frozen=True, kw_only=True)
class BlockSweep:
    """Result of the replays of one block."""

    placement: Placement
    output_slope: float
    """Slope of log |f(a x)| over log a between two large scales; NaN if the block could not be replayed."""
    branch_slope: float
    """The same for f(a x) - a x, or for f(a x) - c a x if a block multiplies every row of its stream by one number c.

    NaN if the difference is lost in rounding, and for a block without a norm whose branch stands still at large scales
    alone: it is bounded.
    """
    rows_normalized: bool | None
    """Rows of the output have one length, once a closing norm's gain and bias are undone; None if the output grows."""
    branch_share: float = math.nan
    """|f(x) - x| over |x| of the median row, as the block is called; NaN if that was not seen."""
    cosine: float = math.nan
    """Cosine between f(x) and x, of the median row."""
    follows: bool = False
    """Every call was given the very tensor that the block before had returned, and no other call of that one was."""


@dataclass(eq=False, kw_only=True)
class Replay:
    """One call of a block on a multiple of its stream; the tensors are on the CPU."""

    x: Tensor
    """The scaled stream that the block was given; of this and all other maps the channels are moved last."""
    axis: int = -1
    """Axis of the channels in the block's own stream."""
    factors: Mapping[str, float]
    """Factor on the output of a norm, by path; 0 silences the norm."""
    y: Tensor = field(default_factory=lambda: torch.empty(0))
    """The block's output."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Input of each norm at its first call, by path, in the order of these calls."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Output of each norm at its first call, by path."""
    attentions: dict[str, set[str]] = field(default_factory=dict)
    """Paths of the norms called before attention, by the path of the module that calls attention."""


ReplayAt: TypeAlias = Callable[[float, "NormSite | None", float], Replay]
UNKNOWN = BlockSweep(placement="unknown", output_slope=math.nan, branch_slope=math.nan, rows_normalized=None)


class BlockResponse:
    """The outputs of one block at two scales of its stream, and what they say about its norms.

    Args:
        sites: The model's norms by path.
        replay: Calls the block on a multiple of its stream, with the output of one norm multiplied by a factor.
    """

    def __init__(self, sites: Mapping[str, NormSite], replay: ReplayAt) -> None:
        self._sites, self._replay = sites, replay
        self._small, self._large = replay(_SMALL, None, 1.0), replay(_LARGE, None, 1.0)
        self._output_slope = _slope(self._small.y, self._large.y)
        self._branch_slope = self._slope_of_branch()
        self.is_resolved = not math.isnan(self._branch_slope) or self._output_slope < _GROWS
        """The branch is more than rounding, or the output does not grow."""

    def read(self) -> tuple[BlockSweep, dict[str, Role]]:
        """The verdict, and the roles of the norms that were called."""
        if self._output_slope >= _GROWS:
            roles = {path: self._role_beside_stream(path) for path in self._large.inputs}
            placement, normalized = self._placement_beside_stream(roles), None
        else:
            normalized = self._rows_are_normalized()
            placement, roles = self._across_stream(normalized)
        is_bounded = not self._large.inputs and abs(self._branch_slope) <= _STANDS_STILL and self._follows_short_rows()
        return BlockSweep(
            placement=placement,
            output_slope=self._output_slope,
            branch_slope=math.nan if is_bounded else self._branch_slope,
            rows_normalized=normalized,
        ), roles

    def entrance(self) -> str | None:
        """The norm that the stream goes through before anything is added to it; None where there is none."""
        if self._output_slope >= _GROWS:
            return None
        path = next((path for path in self._large.inputs if self._stops_stream(path)), None)
        return path if path is not None and self._reads_bare_stream(path) else None

    def _placement_beside_stream(self, roles: Mapping[str, Role]) -> Placement:
        pre = [path for path, role in roles.items() if role == "pre"]
        output = [path for path, role in roles.items() if role == "output"]
        if self._branch_slope >= _GROWS and not pre and not output:
            return "none"
        if not abs(self._branch_slope) <= _STANDS_STILL:
            return "unknown"
        into_output = [self._input_slope(path) for path in output]
        if pre and not output:
            return "pre"
        if output and not pre and min(into_output) >= _GROWS:
            return "output-only"
        # Behind a norm, what enters the one at the branch's end stands still: two halves of one sublayer each.
        if pre and len(output) >= len(pre) and max(into_output) <= _STANDS_STILL:
            return "peri"
        # Its input grows, so nothing before it normalizes; its output is not the branch.
        if not pre and not output and any(self._input_slope(path) >= _GROWS for path in roles):
            return "in-branch"
        return "unknown"

    def _role_beside_stream(self, path: str) -> Role:
        if self._reads_stream(path):
            return "pre"
        if self._feeds_attention(path):
            return "query-key"
        output = self._large.outputs[path]
        if output.shape == self._large.y.shape:
            lost = self._large.y - self._replay(_LARGE, self._sites[path], 0.0).y
            if median_cosine(lost, output) > _ADDED:
                return "output"
        return "unknown"

    def _across_stream(self, normalized: bool) -> tuple[Placement, dict[str, Role]]:
        """A norm sits in the stream's way."""
        in_the_way = [path for path in self._large.inputs if self._stops_stream(path)]
        roles: dict[str, Role] = {}
        for path in self._large.inputs:
            if path in in_the_way:
                roles[path] = "post"
            elif self._reads_stream(path):
                roles[path] = "pre"
            else:
                roles[path] = "query-key" if self._feeds_attention(path) else "unknown"
        if not abs(self._output_slope) <= _STANDS_STILL:
            return "unknown", roles
        if normalized:
            return ("unknown" if "pre" in roles.values() else "post"), roles
        if in_the_way and self._reads_bare_stream(in_the_way[0]) and self._is_added_to_bare(in_the_way[-1]):
            return "residual-after-norm", roles | dict.fromkeys(in_the_way, "pre")
        return "unknown", roles

    def _slope_of_branch(self) -> float:
        small, large = self._small, self._large
        kept = _kept_multiple(small, large)
        branch = large.y - kept * large.x
        if float((_lengths(branch) / _lengths(large.x)).nanmedian()) < _ROUNDINGS[large.x.dtype]:
            return math.nan
        return _slope(small.y - kept * small.x, branch)

    def _follows_short_rows(self) -> bool:
        """The branch grows with short rows: what stands still at long ones is bounded, as tanh is, and no norm."""
        rms = float(self._large.x.double().square().mean(-1).sqrt().nanmedian()) / _LARGE
        none, small, large = (self._replay(length / rms, None, 1.0) for length in (0.0, *_SHORT))
        # Biases in the branch are there without a row.
        return _slope(small.y - small.x - none.y, large.y - large.x - none.y) > _STANDS_STILL

    def _input_slope(self, path: str) -> float:
        return _slope(self._small.inputs[path], self._large.inputs[path])

    def _reads_stream(self, path: str) -> bool:
        """The norm's input grows with the stream, in its direction; or a part does, where another stream is joined."""
        small, entering, stream = self._small.inputs[path], self._large.inputs[path], self._large.x
        rows = stream.shape[1]
        is_joined = entering.dim() == stream.dim() == 3 and len(entering) == len(stream) and entering.shape[1] > rows
        parts = (slice(rows), slice(-rows, None)) if is_joined else (slice(None),)
        if entering.shape[-1] != stream.shape[-1] or entering[:, parts[0]].numel() != stream.numel():
            return False
        return any(
            _slope(small[:, part], entering[:, part]) >= _GROWS
            and median_cosine(entering[:, part], stream) > _SAME_DIRECTION
            for part in parts
        )

    def _reads_bare_stream(self, path: str) -> bool:
        """The norm's input is the stream, plus at most a constant."""
        added = [replay.inputs[path].reshape(replay.x.shape) - replay.x for replay in (self._small, self._large)]
        share = float((_lengths(added[1]) / _lengths(self._large.x)).nanmedian())
        return share < _ROUNDINGS[self._large.x.dtype] or _slope(*added) <= _STANDS_STILL

    def _is_added_to_bare(self, path: str) -> bool:
        """A branch without a norm is added to the norm's output."""
        output, site = self._large.outputs[path], self._sites[path]
        small, large = (
            self._replay(_LARGE, site, factor).y - factor * output.reshape(self._large.y.shape)
            for factor in (_SMALL, _LARGE)
        )
        return _slope(small, large) >= _GROWS

    def _feeds_attention(self, path: str) -> bool:
        """The norm's rows are heads or another width on the way to attention, or it sits in attention's own module.

        Rows of the stream's width elsewhere are another stream's, or those of a map. Heads in a block in which no
        attention is seen count too: its attention may be of another kind.
        """
        entering, stream, attentions = self._large.inputs[path], self._large.x, self._large.attentions
        is_of_heads = entering.dim() == 4 > stream.dim()
        if not attentions:
            return is_of_heads
        behind = [parent for parent, first in attentions.items() if path in first]
        if is_of_heads or entering.shape[-1] != stream.shape[-1]:
            return bool(behind)
        return any(f"{self._sites[path].parent}.".startswith(f"{parent}.") for parent in behind)

    def _stops_stream(self, path: str) -> bool:
        """With the norm's output set to 0, the block gives the stream and its opposite the same output."""
        if self._large.inputs[path].numel() != self._large.x.numel():
            return False
        site = self._sites[path]
        y, opposite = self._replay(_LARGE, site, 0.0).y, self._replay(-_LARGE, site, 0.0).y
        return float((y - opposite).abs().max()) <= _RAW_SPREAD * float(y.abs().max())

    def _rows_are_normalized(self) -> bool:
        y = self._large.y.double()
        closing = [path for path, output in self._large.outputs.items() if torch.equal(output, self._large.y)]
        if not closing:
            return _spread(_lengths(y)) < _RAW_SPREAD
        site = self._sites[closing[-1]]
        # Rows of a norm over several axes hold several tokens.
        rows = y.flatten(y.dim() - (site.spec.rows.num_trailing or 1))
        if any(part is not None and part.shape[-1] != rows.shape[-1] for part in (site.bias, site.gain)):
            return _spread(_lengths(y)) < _UNDONE_SPREAD
        if site.bias is not None:
            rows = rows - site.bias.to(y)
        if site.gain is not None:
            gain = site.gain.to(y)
            rows = torch.where(gain == 0, 0.0, rows / gain)
        return _spread(_lengths(rows)) < _UNDONE_SPREAD


def placement_of_batch_norms(block: BlockCall, norms: Sequence[nn.Module], replay: Callable[[], Replay]) -> Placement:
    """The placement of batch norms, whose running statistics keep the scale of a stream; `replay` calls the block.

    With their outputs at 0 the branch is gone: the block returns its stream, or what a ReLU at its end leaves of that.
    """
    entered: list[Tensor] = []

    def silence(_module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
        entered.append(block.rows(local(args[0])).detach().clone().cpu())
        return torch.zeros_like(y)

    with hooked(norm.register_forward_hook(silence) for norm in norms):
        silent = replay()
    if not any(median_cosine(silent.y, x) > _SAME_DIRECTION for x in (silent.x, silent.x.relu())):
        return "unknown"
    return "pre" if any(torch.equal(x, silent.x) for x in entered) else "in-branch"


def median_cosine(a: Tensor, b: Tensor) -> float:
    """The median over rows of the cosine between two tensors whose rows correspond."""
    a, b = (rows.cpu().double() for rows in (a, b.reshape(a.shape)))
    cosines = torch.nn.functional.cosine_similarity(a, b, dim=-1)
    return float(cosines.nanmedian())


def _lengths(rows: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(rows.double(), dim=-1)
    return lengths.flatten()


def _slope(small: Tensor, large: Tensor) -> float:
    """The median row's slope of log length over log scale."""
    ratio = (_lengths(large) / _lengths(small)).log() / math.log(_LARGE / _SMALL)
    return float(ratio[ratio.isfinite()].median()) if bool(ratio.isfinite().any()) else math.nan


def _spread(lengths: Tensor) -> float:
    return float((lengths.max() - lengths.min()) / lengths.median())


def _kept_multiple(small: Replay, large: Replay) -> float:
    """The number by which a block multiplies its stream: 1, unless every row agrees on another at both scales."""
    x, y = torch.stack((small.x, large.x)).double(), torch.stack((small.y, large.y)).double()
    multiples = ((x * y).sum(-1) / x.square().sum(-1)).flatten()
    multiple = float(multiples.nanmedian())
    return multiple if abs(multiple - 1) > 1e-2 and _spread(multiples) < 1e-2 else 1.0
