"""One run of a model in which every block is called again on scaled inputs: verdicts for blocks, roles for norms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normkit.identification.offloading import in_memory
from normkit.identification.sharding import is_distributed, local
from normkit.identification.sites import NormSite, is_within
from normkit.identification.state import buffers_kept
from normkit.identification.tracing import first_output, first_tensor, floating_tensors
from normkit.measurement.attention import softmax_logits
from normkit.measurement.block_response import (
    UNKNOWN,
    BlockResponse,
    BlockSweep,
    Replay,
    median_cosine,
    placement_of_batch_norms,
)
from normkit.measurement.facts import Role
from normkit.measurement.hooks import Listener, observed
from normkit.measurement.layout import BlockCall
from normkit.measurement.running import mapped


class ReplayError(Exception):
    """A block could not be called again on a scaled or widened input, so that says nothing about its norms."""


class Replayer(Listener):
    """Replays blocks, and holds the inputs and outputs of their norms for one small batch."""

    def __init__(self) -> None:
        self.current: Replay | None = None
        """The replay that is running, or None."""

    def replay(
        self,
        block: BlockCall,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *,
        stream: Tensor,
        scale: float,
        factors: Mapping[str, float],
        dtype: torch.dtype,
    ) -> Replay:
        """Call a block with one tensor of its arguments multiplied by `scale`.

        A block in a type narrower than `dtype` is called on copies of its parameters and arguments in
        that type. Buffers and random number generators are left as they were, so every replay draws the
        same numbers.

        Raises:
            ReplayError: If the block raises.
        """
        devices = [stream.device] if stream.device.type == "cuda" else []
        try:
            x = _widened(stream, dtype) * scale

            def given(_name: str, tensor: Tensor) -> Tensor:
                return x if tensor is stream else _widened(tensor, dtype)

            replay = self.current = Replay(x=_copied(block.rows(x)), axis=block.axis, factors=factors)
            with torch.random.fork_rng(devices=devices):
                output = _call(block.module, mapped(args, given), mapped(kwargs, given), dtype)
        except (RuntimeError, TypeError) as error:
            # Sizes and types that do not fit; TypeError where a device has no float64.
            raise ReplayError(str(error)) from error
        finally:
            self.current = None
        y = first_output(output, (stream, *args, *kwargs.values()))
        assert y is not None
        replay.y = _copied(block.rows(y))
        return replay

    def before_site(self, site: NormSite, x: Tensor) -> None:
        """Record the input of a norm."""
        if self.current is not None and site.path not in self.current.inputs:
            self.current.inputs[site.path] = _copied(_rows(site, x, self.current.axis))

    def after_site(self, site: NormSite, y: Tensor, _given: object) -> Tensor | None:
        """Record the output of a norm, or alter it."""
        if self.current is None:
            return None
        if site.path not in self.current.outputs:
            self.current.outputs[site.path] = _copied(_rows(site, y, self.current.axis))
        factor = self.current.factors.get(site.path)
        return None if factor is None else y * factor

    def at_attention(self, parent: str, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the norms that were called before attention."""
        if self.current is not None and (function == "sdpa" or softmax_logits(args, kwargs) is not None):
            self.current.attentions.setdefault(parent, set()).update(self.current.inputs)


def _call(module: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype) -> object:
    """Call a module, on copies of parameters and buffers where these are narrower; buffers keep their values.

    In a context of its own: transformers gathers the hidden states of a run in a context variable, and a model such as
    LLaVA picks one of them by its place.
    """
    buffers = dict(module.named_buffers())
    tensors = {**dict(module.named_parameters()), **buffers}
    copies = {name: _widened(tensor, dtype) for name, tensor in tensors.items()}
    if any(copies[name] is not tensor for name, tensor in tensors.items()):
        if any(map(is_distributed, tensors.values())):
            raise RuntimeError("the parameters are spread over processes, and are not copied for a replay")
        copies |= {name: buffer.clone() for name, buffer in buffers.items() if copies[name] is buffer}
        return Context().run(functional_call, module, copies, args, kwargs)
    with buffers_kept(module):
        return Context().run(module, *args, **kwargs)


def _median_rms(stream: Tensor) -> float:
    return float(stream.detach().double().square().mean(-1).sqrt().nanmedian())


def _rows(site: NormSite, tensor: Tensor, axis: int) -> Tensor:
    """The input or output of a norm beside a stream whose channels are along this axis, with its channels last."""
    is_map = tensor.dim() == 4 and axis == 1 and site.spec.rows.channel_axis == 1
    return tensor.movedim(1, -1) if is_map else tensor


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU, which later in-place operations of the block do not change."""
    return local(tensor).detach().clone().cpu()


def _widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a floating-point type at least as wide; others are left as they are."""
    if not tensor.is_floating_point() or torch.finfo(tensor.dtype).bits >= torch.finfo(dtype).bits:
        return tensor
    return tensor.to(dtype)


# A norm at the end of a stack reads what the last block returned, up to a factor.
_SAME_DIRECTION = 0.99


def sweep(
    model: nn.Module, sites: Sequence[NormSite], blocks: Sequence[BlockCall], run: Callable[[], object]
) -> tuple[tuple[BlockSweep, ...], dict[str, Role], str | None]:
    """Run the model once; where a block is first called, replay it on scaled inputs.

    16-bit blocks are replayed on float32 copies of their parameters, one block at a time; blocks whose branch is lost
    in rounding, on float64 copies. The model and the random number generators are left as they were, also if `run`
    raises. `run` calls the model on a small input, without a cache of keys and values.

    Returns:
        One sweep a block; the role of each site by path; the path of the norm after the last block, or None.
    """
    sweeper = _Sweeper(sites)
    with torch.no_grad(), observed(model, sites, blocks, [path for path, _ in model.named_modules()], sweeper):
        run()
    sweeper.settle()
    # Roles of the norms outside the blocks, and the norm after the last block. A module of a block's class that is no
    # block, as where it changes the sizes, has norms of its own.
    classes = {type(block.module) for block in blocks} - {nn.Sequential}
    alike = tuple(f"{path}." for path, module in model.named_modules() if type(module) in classes)
    roles: dict[str, Role] = {}
    final_norm: str | None = None
    before: str | None = None
    for index, visit in enumerate(sweeper.visits):
        if not visit.path:
            before = visit.block_list
            continue
        after = next((later.block_list for later in sweeper.visits[index:] if not later.path), None)
        role: Role = "unknown"
        if before is None:
            role = "embedding" if after is not None and not _in_repeated(model, visit.path) else "unknown"
        elif after is None and final_norm is None and (visit.reads_stream or visit.reads_part):
            role, final_norm = "final", visit.path
        elif after not in (None, before) and not visit.path.startswith(alike):
            # Between two stacks: the end of the first, or the beginning of the second, as where it lies beside that.
            beside = (after or "").rpartition(".")[0]
            begins = bool(beside) and is_within(visit.path, beside) and not is_within(before, beside)
            role = "final" if (visit.reads_stream or visit.is_pooled) and not begins else "embedding"
        roles.setdefault(visit.path, role)
    unseen: dict[str, Role] = dict.fromkeys((site.path for site in sites), "unknown")
    return tuple(sweeper.swept(block) for block in blocks), unseen | roles | sweeper.roles, final_norm


def _in_repeated(model: nn.Module, path: str) -> bool:
    """The norm lies in one of several modules of a class in a ModuleList: in a block that was not found as one."""
    names = (path.partition(":")[0] if ":" in path else path.rpartition(".")[0]).split(".")
    for depth, name in enumerate(names):
        members = model.get_submodule(".".join(names[:depth]))
        if isinstance(members, nn.ModuleList):
            return sum(type(each) is type(members[int(name)]) for each in members) > 1
    return False


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
    is_pooled: bool = False
    """It reads one such row a sample."""


# Roles of norms that do not read the stream itself, and may read another one.
_BESIDE: Collection[Role] = ("unknown", "query-key")


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
        self._entrances: dict[str, tuple[BlockSweep, dict[str, Role]]] = {}
        self._in_block, self._axis = False, -1
        self._returned: tuple[int, Tensor, int] | None = None
        self._calls: Counter[int] = Counter()
        self._following: Counter[int] = Counter()

    def swept(self, block: BlockCall) -> BlockSweep:
        """The observations of one block."""
        share, cosine = self._changes.get(block.path, (math.nan, math.nan))
        calls = {self._following[block.index], self._calls[block.index], self._calls[block.index - 1]}
        follows = len(calls) == 1 and 0 not in calls
        return replace(self.sweeps.get(block.path, UNKNOWN), branch_share=share, cosine=cosine, follows=follows)

    def settle(self) -> None:
        """Place first blocks that normalize the embeddings: what leaves that norm is the stream of their branches.

        They are placed where that gives them the placement of all other blocks of their list.
        """
        for path, (inside, roles) in self._entrances.items():
            parent = path.rpartition(".")[0]
            like = {other: each for other, each in self.sweeps.items() if other.rpartition(".")[0] == parent}
            others = {each.placement for other, each in like.items() if other != path}
            if inside.placement not in ("unknown", "residual-after-norm") and others <= {inside.placement}:
                self.sweeps[path] = inside
                self.roles |= roles

    def before_block(self, block: BlockCall, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self.current is not None:
            return
        x = first_tensor(args, kwargs)
        self._calls[block.index] += 1
        if x is not None and self._returned is not None and not x.is_inference():
            before, y, version = self._returned
            self._following[block.index] += before == block.index - 1 and y is x and x._version == version
        self._in_block, self._axis = True, block.axis
        block_list = block.path.rpartition(".")[0]
        is_first = all(visit.block_list != block_list for visit in self.visits)
        self.visits.append(_Visit(block_list=block_list))
        # Only a module can be called again.
        if block.path in self.sweeps or block.leaves is not None:
            return
        self.sweeps[block.path] = UNKNOWN
        # The block may overwrite its input.
        self._entered = None if x is None else block.rows(local(x).detach().to("cpu", torch.float64, copy=True))
        if x is None or not 0 < _median_rms(block.rows(local(x))) < math.inf:
            return
        stream = x

        def read(dtype: torch.dtype) -> bool:
            replay = self._replaying(block, args, kwargs, stream, dtype)
            fingerprint = BlockResponse(self._sites, replay)
            found, roles = fingerprint.read()
            if found.placement == "unknown" and is_first and (entrance := fingerprint.entrance()) is not None:
                behind = self._replaying(block, args, kwargs, stream, dtype, entrance)
                inside, others = BlockResponse(self._sites, behind).read()
                self._entrances[block.path] = inside, others | {entrance: "embedding"}
            norms = [each for each in block.module.modules() if isinstance(getattr(each, "running_mean", None), Tensor)]
            # A bounded activation in the branch, such as ReLU6, makes it stand still without a norm of rows.
            if found.placement in ("none", "unknown") and norms and not roles:
                found = replace(
                    found, placement=placement_of_batch_norms(block, norms, lambda: replay(1000.0, None, 1.0))
                )
            self.sweeps[block.path] = found
            self.roles |= roles | self._roles_beside(block, args, kwargs, roles, dtype)
            return fingerprint.is_resolved

        # A branch that is lost in float32's rounding may be found in float64; not every block can be widened so.
        with suppress(ReplayError), in_memory(block.module):
            read(torch.float32) or read(torch.float64)

    def _replaying(
        self,
        block: BlockCall,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        stream: Tensor,
        dtype: torch.dtype,
        entrance: str | None = None,
    ) -> Callable[[float, NormSite | None, float], Replay]:
        """Replays of a block on multiples of a stream whose root mean square is made at least 1.

        With an entrance, a norm that the stream goes through first, the multiples are those of what leaves that norm.
        """

        def once(scale: float, factors: Mapping[str, float]) -> Replay:
            one = self.replay(block, args, kwargs, stream=stream, scale=scale, factors=factors, dtype=dtype)
            if one.y.shape != one.x.shape:
                raise ReplayError("the output has other rows than the input, as where a process has its own")
            return one

        begins = block.rows(local(stream)) if entrance is None else once(1.0, {}).outputs[entrance]
        unit = max(1.0, 1.0 / _median_rms(begins))

        def replay(scale: float, altered: NormSite | None, factor: float) -> Replay:
            by, factors = scale * unit, {} if altered is None else {altered.path: factor}
            if entrance is None:
                return once(by, factors)
            one = once(1.0, factors | {entrance: by})
            del one.inputs[entrance]
            one.x = one.outputs.pop(entrance) * by
            return one

        return replay

    def _roles_beside(
        self,
        block: BlockCall,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        roles: Mapping[str, Role],
        dtype: torch.dtype,
    ) -> dict[str, Role]:
        """Roles, beside other streams of a block, of norms that read no first one, as of text beside an image."""
        x, found = first_tensor(args, kwargs), dict[str, Role]()
        if x is None:
            return found
        for other in floating_tensors((*args, *kwargs.values())):
            left = {path for path, role in {**roles, **found}.items() if role in _BESIDE}
            is_stream = other.dim() == x.dim() == 3 and other.shape[-1] == x.shape[-1]
            if not left or not is_stream or other.shape == x.shape:
                continue
            with suppress(ReplayError):
                one = self.replay(block, args, kwargs, stream=other, scale=1.0, factors={}, dtype=dtype)
                # A stream may end in its last block, which reads it and returns no such rows.
                read: dict[str, Role] = {path: "pre" for path, given in one.inputs.items() if torch.equal(given, one.x)}
                if one.y.shape == one.x.shape and 0 < _median_rms(other) < math.inf:
                    read = BlockResponse(self._sites, self._replaying(block, args, kwargs, other, dtype)).read()[1]
                found |= {path: role for path, role in read.items() if path in left and role not in _BESIDE}
        return found

    def after_block(self, block: BlockCall, y: Tensor, _given: object) -> None:
        if self.current is not None:
            return
        self._returned = None if y.is_inference() else (block.index, y, y._version)
        y = block.rows(local(y))
        self._in_block, self._stream = False, y
        x, self._entered = self._entered, None
        if x is not None and x.shape == y.shape and block.path not in self._changes:
            moved = y.cpu().double() - x
            shares = torch.linalg.vector_norm(moved, dim=-1) / torch.linalg.vector_norm(x, dim=-1)
            self._changes[block.path] = float(shares.nanmedian()), median_cosine(x, y)

    def before_site(self, site: NormSite, x: Tensor) -> None:
        super().before_site(site, x)
        x, stream = _rows(site, local(x), self._axis), self._stream
        if self.current is None and not self._in_block:
            same_shape = stream is not None and stream.shape == x.shape
            # A map of more rows is another stage's, as on the way up of a UNet.
            reads_part = (
                stream is not None and not same_shape and stream.shape[-1] == x.shape[-1] and x.numel() < stream.numel()
            )
            self.visits.append(
                _Visit(
                    path=site.path,
                    reads_stream=stream is not None and same_shape and median_cosine(x, stream) > _SAME_DIRECTION,
                    reads_part=reads_part,
                    is_pooled=reads_part and stream is not None and x.numel() == len(stream) * x.shape[-1],
                )
            )
