"""What is being identified: a copy of a module that may be changed at will, or a plain function."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from normkit.errors import ModelError, ShapeError

Verdict = Literal["norm", "batch", "gated", "not a norm"]
NormLike = nn.Module | Callable[..., object]

FAR = 2.0**20
"""An input scale at which no usual eps is felt: 1e-3 outside the root shortens a row by 1e-9. Squares stay finite."""

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
    """Ends an identification: what was seen, and the verdict that follows. No spec describes it."""

    def __init__(self, verdict: Verdict, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict
        self.reason = reason


class Specimen:
    """A norm that can be called and, where it is a module, given other parameters.

    Args:
        norm: A module, which is copied without its hooks, put in eval mode and in float32 (a module
            on the meta device gets memory on the CPU); or a function of one tensor.

    Attributes:
        module: The copy, or None for a function.
        device: Where its inputs must be.
    """

    def __init__(self, norm: NormLike) -> None:
        self._function: Callable[..., object] = norm
        self.module: nn.Module | None = None
        self.device = torch.device("cpu")
        if isinstance(norm, nn.Module):
            try:
                self._function = self.module = _bare_copy(norm).eval().float()
            except Exception as error:  # a foreign module may refuse in any way
                raise ModelError(
                    f"a {type(norm).__name__} cannot be copied ({_first_line(error)}); pass its forward"
                ) from error
            tensors = [*self.module.parameters(), *self.module.buffers()]
            if any(tensor.is_meta for tensor in tensors):
                _materialise(self.module)
            elif tensors:
                self.device = tensors[0].device

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The copy's own floating-point parameters by name; none for a function."""
        if self.module is None:
            return {}
        return {name: value.data for name, value in self.module.named_parameters() if value.is_floating_point()}

    def __call__(self, x: Tensor) -> Tensor:
        """The output for x, which is cloned first, as a tensor of x's shape.

        Raises:
            UnrecognisedError: If it cannot be called with one tensor, or returns anything else.
            ShapeError: If it refuses the shape of x.
        """
        try:
            y = self._function(x.clone())
        except TypeError as error:
            raise UnrecognisedError("gated", f"it cannot be called with one tensor ({_first_line(error)})") from error
        except Exception as error:  # a foreign module may refuse in any way
            raise ShapeError(
                f"the norm refuses an input of shape {tuple(x.shape)} ({_first_line(error)}); "
                "give the shape of an example input"
            ) from error
        return _checked(y, x)

    def call_in(self, dtype: torch.dtype, x: Tensor) -> Tensor | None:
        """The output of a copy with parameters in `dtype`, or None where it does not run so.

        x keeps its own dtype. The parameters are rounded; those of this specimen stay.
        """
        try:
            function = self._function if self.module is None else _bare_copy(self.module).to(dtype)
            return _checked(function(x.clone()), x)
        except Exception:  # a foreign module may refuse in any way
            return None

    def draw(self, generator: torch.Generator, sign: float = 1.0) -> None:
        """Give every parameter random entries of magnitude 0.5 to 1.5 and of this sign."""
        for parameter in self.parameters.values():
            parameter.copy_(sign * (torch.rand(parameter.shape, generator=generator) + 0.5))

    def fill(self, name: str | None, value: float) -> None:
        """Set all entries of a parameter, if there is one of that name."""
        if name is not None:
            self.parameters[name].fill_(value)

    def in_training_mode(self) -> Specimen:
        """A copy of it in training mode."""
        assert self.module is not None
        other = Specimen(self.module)
        assert other.module is not None
        other.module.train()
        return other

    def gated(self) -> Specimen:
        """It with a constant tensor of the input's shape as its second argument."""
        function = self._function
        return Specimen(lambda x: function(x, torch.full_like(x, 0.5)))

    @property
    def has_running_statistics(self) -> bool:
        """There are floating-point buffers, as in a batch norm."""
        return self.module is not None and any(buffer.is_floating_point() for buffer in self.module.buffers())


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without gradients, autocast and warnings, in float32, and with torch's state as it was afterwards."""
    default = torch.get_default_dtype()
    with (
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def _checked(y: object, x: Tensor) -> Tensor:
    if not isinstance(y, Tensor):
        raise UnrecognisedError("not a norm", f"it returns {type(y).__name__}, not a tensor")
    if y.shape != x.shape or not y.is_floating_point():
        raise UnrecognisedError(
            "not a norm", f"it turns shape {tuple(x.shape)} into {y.dtype} of shape {tuple(y.shape)}"
        )
    return y


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _bare_copy(module: nn.Module) -> nn.Module:
    """A deep copy without hooks, which may hold on to anything."""
    memo: dict[int, object] = {}
    for part in module.modules():
        for name in _HOOKS:
            if (hooks := vars(part).get(name)) is not None:
                memo[id(hooks)] = type(hooks)()
    return copy.deepcopy(module, memo)


def _materialise(module: nn.Module) -> None:
    """Memory for a module on the meta device; its buffers' values are unknown and become 1."""
    module.to_empty(device="cpu")
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data.fill_(1.0)
