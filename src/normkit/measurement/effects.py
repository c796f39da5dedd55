"""Facts that one pass shows beside the norms that were found: norms written by hand, and parts without effect.

`x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)`, a division by a standard deviation or `F.normalize` inside a
forward is seen by what it does: rows of many lengths enter, rows of one length leave. What it computes beside that, and
how, is not measured. Parts without effect are norms whose output nothing reads, and branches that add the same vector
to every row.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normkit.identification.sharding import local
from normkit.identification.tracing import first_output, members
from normkit.measurement.hooks import every_module
from normkit.measurement.layout import BlockCall
from normkit.measurement.running import tensors
from normkit.text import percent

# Names of torch's functions and methods that multiply or divide; those of nn.functional that normalize.
_SCALING = {"mul", "multiply", "rmul", "imul", "div", "divide", "true_divide", "truediv", "itruediv", "normalize"}
# Fewer features are no vector of a model, as the weights of some experts; fewer rows may be alike by chance.
_FEWEST_FEATURES, _FEWEST_ROWS = 16, 4
# Spread of the lengths behind a norm (eps and the rounding of 16 bits), and before it.
_ALIKE, _APART, _TIMES = 1e-2, 2e-2, 5.0
_CENTRED = 1e-4
# Rows that a matrix makes of equal rows differ by float32's rounding at most; rows of a stream are farther apart.
_SAME, _DIFFERENT = 1e-6, 1e-2


@dataclass(frozen=True, kw_only=True)
class HandwrittenNorm:
    """A place in a module's forward at which rows are normalized."""

    path: str
    """Path of the innermost module that was running, and the function that left the rows, as in "blocks.0:mul"."""
    reason: str
    """The observation there, on one line."""
    keeps_scale: bool = False
    """Though the rows of its input left with one length, a multiple of that input leaves as a multiple: it divides by
    what another call measured."""


@dataclass(eq=False, kw_only=True)
class _Call:
    """The first call of a module."""

    differs: bool
    """It was given one stream, whose rows differ."""
    has_single: bool = False
    """It was also given samples of one row, and an attention over one key has one output."""
    is_constant: bool = False
    """The rows that left it are one vector."""
    shape: torch.Size | None = None
    """The shape of what left it."""


class Effects(TorchFunctionMode):
    """Compares, in one forward pass, rows before and after each product, quotient and module, and notes what is read.

    `norms` are paths of modules that are norms, `others` those of norms that no spec describes.
    """

    def __init__(self, norms: Collection[str], others: Collection[str] = ()) -> None:
        super().__init__()
        self._norms, self._known = norms, (*norms, *others)
        self._found: dict[str, list[str]] = {}
        self._read: set[int] = set()
        # The tensors themselves: the number of one that is gone is given to another.
        self._made: dict[str, list[Tensor]] = {}
        self._calls: dict[str, _Call] = {}
        self._running: list[tuple[str, _Call]] = [("", _Call(differs=False))]

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch the forward pass inside; the model is left as it was, also after an exception."""
        with every_module(model, self._enter, self._leave), self:
            yield

    def handwritten(self, model: nn.Module, run: Callable[[], object]) -> tuple[HandwrittenNorm, ...]:
        """The places, in forward order, that normalize rows and are none of the norms found.

        `run` calls the model again on the same input, once for each place.
        """
        return tuple(
            HandwrittenNorm(
                path=path,
                reason=lines[0] + (f"; {len(lines)} such calls" if len(lines) > 1 else ""),
                keeps_scale=_keeps_scale(model.get_submodule(path.partition(":")[0]), run),
            )
            for path, lines in self._found.items()
        )

    def unread(self, model: nn.Module, output: object, run: Callable[[], object]) -> tuple[str, ...]:
        """Paths of norms whose output nothing reads.

        A norm is first suspected where no function of torch is given its output; that counts where another output in
        its place leaves the model's own as it is, bit for bit. `run` calls the model again on the same input.
        """
        read = self._read | {id(value) for _, value in tensors(output)}
        suspected = [path for path, made in self._made.items() if not any(id(value) in read for value in made)]
        return tuple(path for path in suspected if _changes_nothing(model.get_submodule(path), output, run))

    def constant(self, blocks: Sequence[BlockCall]) -> tuple[str, ...]:
        """Paths of branches whose rows are all one vector.

        A branch is the outermost module inside a block that gives all rows of the stream one vector, though the rows
        that enter it, or a module in it, differ.
        """
        found: dict[str, None] = {}
        for block in blocks:
            stream = self._calls[block.path].shape if block.path in self._calls else None
            inside = {
                path: call
                for path, call in self._calls.items()
                if path.startswith(f"{block.path}.") and call.shape == stream and block.leaves is None
            }
            for path, call in inside.items():
                above = [other for other in inside if f"{path}.".startswith(f"{other}.")]
                whole = all(inside[other].is_constant and not inside[other].has_single for other in above)
                if call.differs and whole:
                    found[min(above, key=len)] = None
        return tuple(path for path in found if path not in self._norms)

    def _enter(self, path: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        with torch._C.DisableTorchFunction():
            given = {id(value): value for _, value in tensors((args, kwargs)) if value.is_floating_point()}
            rows = [value for value in given.values() if _is_stream(value)]
            # With several inputs, such as queries and keys, one of them may have equal rows.
            differs = len(rows) == 1 and _largest_distance(rows[0]) > _DIFFERENT
            has_single = bool(rows) and any(value.dim() == 3 and value.shape[1] == 1 for value in given.values())
        self._running.append((path, _Call(differs=differs, has_single=has_single)))

    def _leave(self, path: str, output: object) -> None:
        # A call that raised never came here.
        while (running := self._running.pop())[0] != path:
            continue
        if (y := first_output(output)) is None:
            return
        if path in self._norms and isinstance(output, Tensor):
            self._made.setdefault(path, []).append(y)
            # The tensor that had this id before no longer exists.
            self._read.discard(id(y))
        call = self._calls.setdefault(path, running[1])
        if call is running[1]:
            with torch._C.DisableTorchFunction():
                call.is_constant, call.shape = _is_stream(y) and _largest_distance(y) <= _SAME, y.shape

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        # Reading a tensor's shape or type is no use of its numbers.
        if name not in ("__get__", "size", "dim"):
            self._read.update(id(value) for _, value in tensors((args, kwargs)))
        name, path = name.strip("_"), self._running[-1][0]
        if name not in _SCALING or any(f"{path}.".startswith(f"{norm}.") for norm in self._known):
            return function(*args, **kwargs)
        given = [value for value in (*args, *kwargs.values()) if _has_rows(value)]
        # Before the call, which may overwrite what it is given.
        before = [(tuple(value.shape), {axis: _spread(value, axis) for axis in _axes(value)}) for value in given]
        y = function(*args, **kwargs)
        if _has_rows(y) and (line := _line(y, before)) is not None:
            self._found.setdefault(f"{path}:{name}", []).append(line)
        return y


def _has_rows(value: object) -> bool:
    """An activation of many rows: the normalizing of a weight is another thing."""
    is_activation = isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.is_floating_point()
    return is_activation and isinstance(value, Tensor) and value.dim() > 1 and bool(_axes(value))


def _axes(value: Tensor) -> tuple[int, ...]:
    """The axes that rows may lie along: the last one, or the channels."""
    return tuple(
        axis
        for axis in ((-1, 1) if value.dim() > 2 else (-1,))
        if value.shape[axis] >= _FEWEST_FEATURES and value.numel() >= _FEWEST_ROWS * value.shape[axis]
    )


def _spread(value: Tensor, axis: int) -> float:
    """Largest less smallest length of a row over the median one; NaN where that says nothing."""
    lengths: Tensor = torch.linalg.vector_norm(value.detach().double(), dim=axis)
    return float((lengths.max() - lengths.min()) / lengths.median())


def _line(y: Tensor, before: Sequence[tuple[tuple[int, ...], Mapping[int, float]]]) -> str | None:
    """The kind of normalized rows, in words; None if the rows are not normalized."""
    for axis in _axes(y):
        after = _spread(y, axis)
        entered = [spreads[axis] for shape, spreads in before if shape == tuple(y.shape)]
        if not entered or not after < _ALIKE or not entered[0] > max(_APART, _TIMES * after):
            continue
        rows = y.detach().double()
        rms = float(rows.square().mean(axis).sqrt().median())
        energy = float((rows.mean(axis).square() / rows.square().mean(axis)).median())
        length = rms * math.sqrt(y.shape[axis])
        size = f"length {length:.4g}" if abs(length - 1) < abs(rms - 1) else f"rms {rms:.4g}"
        centred = ", without a mean" if energy < _CENTRED else ""
        left = f"rows of {y.shape[axis]} features leave with one {size}{centred}"
        return f"{left}; their lengths differed by {percent(entered[0])} before"
    return None


def _keeps_scale(module: nn.Module, run: Callable[[], object]) -> bool:
    """Called with a multiple of what it was given, a module without parts returns that multiple."""
    if any(module.children()):
        return False
    calls: list[tuple[Tensor, Tensor]] = []

    def note(_module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if not calls and len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            calls.append((args[0].clone(), output.clone()))

    with torch.no_grad():
        with module.register_forward_hook(note):
            run()
        if not calls:
            return False
        ((given, left),) = calls
        longer = copy.deepcopy(module)(given * _TIMES)
    ratio = torch.linalg.vector_norm(longer.double()) / torch.linalg.vector_norm(left.double())
    return abs(float(ratio) / _TIMES - 1) < _ALIKE


def _is_stream(value: Tensor) -> bool:
    return value.is_floating_point() and value.dim() == 3 and value.shape[0] * value.shape[1] >= _FEWEST_ROWS


def _largest_distance(value: Tensor) -> float:
    """The largest difference of any row from the first, over the largest magnitude; 0 where all is 0."""
    rows = local(value.detach()).double().flatten(0, 1)
    return float((rows - rows[0]).abs().max() / rows.abs().max().clamp_min(torch.finfo(torch.float64).tiny))


def _changes_nothing(norm: nn.Module, output: object, run: Callable[[], object]) -> bool:
    """The model's output is the same where the norm's output is another."""

    def alter(_module: nn.Module, _args: object, output: object) -> object:
        return output * 3 + 1 if isinstance(output, Tensor) else None

    with norm.register_forward_hook(alter):
        as_it_is, altered = first_output(members(output)), first_output(members(run()))
    return as_it_is is not None and altered is not None and torch.equal(as_it_is, altered)
