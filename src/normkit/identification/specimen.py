"""The specimen: a copy of a module that identification may call and change, or a function; and how finely it shows."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import IdentificationError, ModelError, ShapeError
from normkit.identification.passport import Reading, Verdict
from normkit.text import first_line


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The input scales and tolerances for a norm that is called in one dtype."""

    far: float
    """An input scale at which no usual eps is felt, and squares stay finite: 1e-3 outside the root shortens a row by
    1e-9 in float32, by 1e-4 in float16, which is half of its last digit."""
    growth: float
    """Factor by which a row grows to see that its output stays. Its squares are still finite."""
    scales: tuple[int, int]
    """Powers of two between which the response to small inputs is measured. At the first, a mean square is still a
    normal float32 (in float16: the input has a digit); at the last, no eps is felt."""
    rows: int
    """Number of features, over all rows, that are averaged at each scale: rounding to 8 or 11 bits moves each by
    1e-3."""
    window: tuple[float, float]
    """Range of responses from which eps is computed. Below it the output is lost in rounding; above it eps is not felt,
    and the rounding of an output counts ten times in eps."""
    fits: float
    """A fit with a smaller relative residual is right; a wrong formula leaves 0.03 or more."""
    homogeneous: float
    """A smaller relative change of the output of a grown row is rounding."""
    agrees: float
    """A sample with a smaller relative error against its formula in float64 agrees. The right formula leaves 1e-6 in
    float32, and 1 to 4 roundings of 2**-9 or 2**-12 in 16 bits."""
    offset: float
    """An offset that is this near to a rounder number is that number."""
    length: float
    """Five times the relative error of the measured length of rows."""
    eps: float
    """Lower limit for the relative error of a measured eps, which may have been rounded to the dtype."""
    constant: float
    """The eps of the right model varies less than this between scales; that of a wrong one by 0.28 or more."""
    least: float
    """The smallest number of the dtype. An eps that is rounded to the dtype may be off by half of it."""
    smallest: float
    """Rows of this size still have the value of the formula. In float16 the squares of smaller rows have too few
    digits."""
    spike: float
    """Size of the one large element in the rows that show a rescaled formula."""


_FLOAT32 = Precision(
    far=2.0**20,
    growth=64.0,
    scales=(-62, 10),
    rows=1,
    window=(0.03, 0.98),
    fits=1e-4,
    homogeneous=1e-3,
    agrees=3e-5,
    offset=1e-5,
    length=1e-5,
    eps=1e-6,
    constant=2e-3,
    least=0.0,
    smallest=1e-12,
    spike=1000.0,
)
_BFLOAT16 = replace(
    _FLOAT32,
    rows=16384,
    window=(0.03, 0.9),
    fits=0.015,
    homogeneous=0.02,
    agrees=0.05,
    offset=0.03,
    length=2e-3,
    eps=5e-3,
    constant=0.05,
)
_FLOAT16 = Precision(
    far=8.0,
    growth=4.0,
    scales=(-22, 3),
    rows=16384,
    window=(0.03, 0.9),
    fits=0.004,
    homogeneous=0.005,
    agrees=0.02,
    offset=0.005,
    length=3e-4,
    eps=1e-3,
    constant=0.05,
    least=2.0**-24,
    smallest=2.0**-10,
    spike=20.0,
)
_PRECISIONS = {
    # The formula is compared with itself in float64, so float64 shows no more than float32 does.
    torch.float64: _FLOAT32,
    torch.float32: _FLOAT32,
    torch.bfloat16: _BFLOAT16,
    torch.float16: _FLOAT16,
}


def precision_of(dtype: torch.dtype) -> Precision:
    """The precision of a dtype; other dtypes than the four of norms count as float32."""
    return _PRECISIONS.get(dtype, _FLOAT32)


NormLike = nn.Module | Callable[..., object]
Call = Callable[[Any, Tensor], object]
"""How to call a norm with x where norm(x) will not do."""

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class UnrecognisedError(Exception):
    """Ends an identification with a reason and a verdict, because no spec describes what was seen."""

    def __init__(self, verdict: Verdict, reason: str, readings: Mapping[str, Reading] | None = None) -> None:
        super().__init__(reason)
        self.verdict = verdict
        self.reason = reason
        self.readings = readings or {}


class Specimen:
    """A norm that can be called and, if it is a module, given other parameters.

    Args:
        norm: A module, which is copied without its hooks, put in eval mode and in `dtype` (a module
            on the meta device gets memory on the CPU); a method of a module, of which the same is true;
            or a function of one tensor.
        dtype: Of inputs and parameters.
        device: Where its inputs must be; by default where its parameters are, or the CPU.
        call: Called with the norm and x, in place of norm(x).
        samples: How many samples it takes at once, no more and no fewer; None for any number.
        as_given: Keep the module's hooks and its mode, and let all its parameters take gradients, as a test does.
    """

    def __init__(
        self,
        norm: NormLike,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        call: Call | None = None,
        samples: int | None = None,
        as_given: bool = False,
    ) -> None:
        self.samples = samples
        """Other batches are handed over in pieces of that size."""
        owner = getattr(norm, "__self__", None)
        # A method changes its module as much as the module itself does.
        method = getattr(norm, "__func__", None) if isinstance(owner, nn.Module) else None
        self._call: Callable[..., object] = call or method or _directly
        self._function: Any = norm
        self.module: nn.Module | None = None
        """The copy; None for a function."""
        self.dtype = dtype
        self.precision = precision_of(dtype)
        """The input scales and tolerances for its dtype."""
        self.device = torch.device("cpu" if device is None else device)
        copied = norm if isinstance(norm, nn.Module) else owner
        if isinstance(copied, nn.Module):
            try:
                copied = copy.deepcopy(copied) if as_given else _bare_copy(copied).eval()
                self._function = self.module = copied.to(dtype)
            except Exception as error:  # a foreign module may refuse in any way
                raise ModelError(
                    f"a {type(copied).__name__} cannot be copied ({first_line(error)}); pass lambda x: norm(x)"
                ) from error
            tensors = [*self.module.parameters(), *self.module.buffers()]
            if any(tensor.is_meta for tensor in tensors):
                # Memory on the CPU; the values of buffers are unknown and become 1.
                self.module.to_empty(device="cpu")
                for tensor in (*self.module.parameters(), *self.module.buffers()):
                    if tensor.is_floating_point():
                        tensor.data.fill_(1.0)
            elif tensors and device is None:
                self.device = tensors[0].device
            if device is not None:
                self.module.to(self.device)
            for parameter in self.module.parameters() if as_given else ():
                parameter.requires_grad_(parameter.is_floating_point())

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The copy's own floating-point parameters by name; none for a function."""
        if self.module is None:
            return {}
        return {name: value.data for name, value in self.module.named_parameters() if value.is_floating_point()}

    def __call__(self, x: Tensor) -> Tensor:
        """The output for x, which is copied and rounded to the specimen's dtype first, as a tensor of x's shape.

        Raises:
            UnrecognisedError: If it cannot be called with one tensor, or returns anything else.
            ShapeError: If it refuses the shape of x.
        """
        return self.overwriting(x.to(self.dtype, copy=True))

    def overwriting(self, x: Tensor) -> Tensor:
        """The output for x itself, which a norm that works in place changes; errors as for a call."""
        try:
            y = self._called(self._function, x)
        except TypeError as error:
            raise UnrecognisedError("gated", f"it cannot be called with one tensor ({first_line(error)})") from error
        except Exception as error:  # a foreign module may refuse in any way
            raise ShapeError(f"the norm refuses an input of shape {tuple(x.shape)} ({first_line(error)})") from error
        return _checked(y, x)

    def _called(self, function: Any, x: Tensor) -> object:
        """The result for x; joined from pieces, if the norm takes only a fixed number of samples."""
        if self.samples is None or len(x) == self.samples:
            return as_tensor(self._call(function, x))
        parts = []
        for piece in torch.split(x, self.samples):
            # The last piece is filled up with its own last sample.
            filled = torch.cat([piece, piece[-1:].expand(self.samples - len(piece), *piece.shape[1:])])
            y = as_tensor(self._call(function, piece if len(piece) == self.samples else filled))
            if not isinstance(y, Tensor) or y.dim() == 0:
                return y
            parts.append(y[: len(piece)])
        return torch.cat(parts)

    def call_in(self, dtype: torch.dtype, x: Tensor) -> Tensor | None:
        """The output of a copy with parameters in `dtype`, or None where it does not run so.

        x keeps its own dtype. The parameters are rounded; those of this specimen stay.
        """
        try:
            function = self._function
            if self.module is not None and dtype != self.dtype:
                function = _bare_copy(self.module).to(dtype)
            return _checked(self._called(function, x.clone()), x)
        except Exception:  # a foreign module may refuse in any way
            return None

    def draw(self, generator: torch.Generator, factor: float = 1.0) -> None:
        """Give every parameter random entries between 0.5 and 1.5 times this factor."""
        for parameter in self.parameters.values():
            parameter.copy_(factor * (torch.rand(parameter.shape, generator=generator) + 0.5))

    def set(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters to these values, which are rounded to the dtype of each."""
        for name, value in values.items():
            self.parameters[name].copy_(value)

    def in_dtype(self, dtype: torch.dtype) -> Specimen:
        """A copy of it in another dtype."""
        return Specimen(self._function, dtype=dtype, device=self.device, call=self._call, samples=self.samples)

    def in_mode(self, *, training: bool) -> Specimen:
        """A copy of it in training or in evaluation mode."""
        assert self.module is not None
        other = copy.copy(self)
        other._function = other.module = copy.deepcopy(self.module).train(training)
        return other

    def adapted(self, adapter: Callable[[Callable[..., Any], Tensor], object]) -> Specimen:
        """The same norm, called as adapter(run, x), where run(x) is how it is called now."""
        call = self._call
        return Specimen(
            self._function,
            dtype=self.dtype,
            device=self.device,
            call=lambda norm, x: adapter(partial(call, norm), x),
            samples=self.samples,
        )

    def as_function(self) -> Specimen:
        """The same norm as a function, whose parameters stay as they are."""
        return Specimen(lambda x: self._called(self._function, x), dtype=self.dtype, device=self.device)

    @property
    def further(self) -> tuple[inspect.Parameter, ...]:
        """The arguments beside the first, if they can be seen."""
        try:
            signature = inspect.signature(self._function if self.module is None else self.module.forward)
        except (TypeError, ValueError):
            return ()
        further = [*signature.parameters.values()][1:]
        return tuple(each for each in further if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))

    @property
    def has_running_statistics(self) -> bool:
        """There are floating-point buffers, as in a batch norm."""
        return self.module is not None and any(buffer.is_floating_point() for buffer in self.module.buffers())


def as_tensor(thing: object) -> object:
    """An array of numpy, or of a library that hands over its memory, as a tensor of its dtype; else itself."""
    if isinstance(thing, Tensor):
        return thing
    if hasattr(thing, "__array__"):
        import numpy

        try:
            # Copied: an array may be read-only, or lie in memory that the next call writes to.
            return torch.tensor(numpy.asarray(thing))
        except TypeError:  # a dtype that numpy does not have itself, as bfloat16
            pass
    if hasattr(thing, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(thing).clone()
    return thing


def _directly(norm: Callable[..., object], x: Tensor, *further: Tensor, **named: Tensor) -> object:
    return norm(x, *further, **named)


def _checked(y: object, x: Tensor) -> Tensor:
    if not isinstance(y, Tensor):
        raise UnrecognisedError("not a norm", f"it returns {type(y).__name__}, not a tensor")
    if y.layout != torch.strided:
        raise UnrecognisedError("not a norm", f"it returns a tensor of layout {y.layout}")
    if y.device != x.device:
        raise IdentificationError(
            f"the norm returns a tensor on {y.device} for one on {x.device}"
            + (": meta tensors have no values to look at" if y.is_meta else "; pass device=")
        )
    if y.shape != x.shape or not y.is_floating_point():
        raise UnrecognisedError(
            "not a norm", f"it turns shape {tuple(x.shape)} into {y.dtype} of shape {tuple(y.shape)}"
        )
    return y


def one_of(returned: object, index: int = 0) -> object:
    """One out of several things returned, or the only one."""
    if not isinstance(returned, (tuple, list)):
        return returned
    return returned[index] if index < len(returned) else None


def _bare_copy(module: nn.Module) -> nn.Module:
    """A deep copy without hooks, which may hold on to anything."""
    memo: dict[int, object] = {}
    for part in module.modules():
        for name in _HOOKS:
            if (hooks := vars(part).get(name)) is not None:
                memo[id(hooks)] = type(hooks)()
    return copy.deepcopy(module, memo)
