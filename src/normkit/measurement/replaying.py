"""Calls a block again on its own arguments with a scaled stream, and records inputs and outputs of its norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normkit.identification.sharding import is_distributed, local
from normkit.identification.sites import NormSite
from normkit.identification.state import buffers_kept
from normkit.identification.tracing import first_output, first_tensor
from normkit.measurement.attention import softmax_logits
from normkit.measurement.observing import Listener
from normkit.measurement.running import mapped


class ReplayError(Exception):
    """A block could not be called again on a scaled or widened input, so that says nothing about its norms."""


@dataclass(eq=False, kw_only=True)
class Replay:
    """One call of a block on a multiple of its stream; the tensors are on the CPU."""

    x: Tensor
    """The scaled stream that the block was given."""
    altered: NormSite | None
    """A norm whose output was multiplied by `factor`, or None."""
    factor: float
    """The factor on that output; 0 silences the norm."""
    y: Tensor = field(default_factory=lambda: torch.empty(0))
    """The block's output."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Input of each norm at its first call, by path, in the order of these calls."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Output of each norm at its first call, by path."""
    attentions: dict[str, set[str]] = field(default_factory=dict)
    """Paths of the norms called before attention, by the path of the module that calls attention."""


class Replayer(Listener):
    """Replays blocks, and holds the inputs and outputs of their norms for one small batch."""

    def __init__(self) -> None:
        self.current: Replay | None = None
        """The replay that is running, or None."""

    def replay(
        self,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *,
        scale: float,
        altered: NormSite | None,
        factor: float,
        dtype: torch.dtype,
    ) -> Replay:
        """Call a block with the first tensor of its arguments multiplied by `scale`.

        A block in a type narrower than `dtype` is called on copies of its parameters and arguments in
        that type. Buffers and random number generators are left as they were, so every replay draws the
        same numbers.

        Raises:
            ReplayError: If the block raises.
        """
        stream = first_tensor(args, kwargs)
        assert stream is not None
        devices = [stream.device] if stream.device.type == "cuda" else []
        try:
            x = _widened(stream, dtype) * scale

            def given(_name: str, tensor: Tensor) -> Tensor:
                return x if tensor is stream else _widened(tensor, dtype)

            replay = self.current = Replay(x=_copied(x), altered=altered, factor=factor)
            with torch.random.fork_rng(devices=devices):
                output = _call(module, mapped(args, given), mapped(kwargs, given), dtype)
        except (RuntimeError, TypeError) as error:
            # Sizes and types that do not fit; TypeError where a device has no float64.
            raise ReplayError(str(error)) from error
        finally:
            self.current = None
        y = first_output(output)
        assert y is not None
        replay.y = _copied(y)
        if replay.y.shape != replay.x.shape:
            raise ReplayError("this process has other rows of the output than of the input")
        return replay

    def before_site(self, site: NormSite, x: Tensor) -> None:
        """Record the input of a norm."""
        if self.current is not None and site.path not in self.current.inputs:
            self.current.inputs[site.path] = _copied(x)

    def after_site(self, site: NormSite, y: Tensor) -> Tensor | None:
        """Record the output of a norm, or alter it."""
        if self.current is None:
            return None
        if site.path not in self.current.outputs:
            self.current.outputs[site.path] = _copied(y)
        return y * self.current.factor if self.current.altered is site else None

    def at_attention(self, parent: str, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the norms that were called before attention."""
        if self.current is not None and (function == "sdpa" or softmax_logits(args, kwargs, None) is not None):
            self.current.attentions.setdefault(parent, set()).update(self.current.inputs)


def _call(module: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype) -> object:
    """Call a module, on copies of parameters and buffers where these are narrower; buffers keep their values."""
    buffers = dict(module.named_buffers())
    tensors = {**dict(module.named_parameters()), **buffers}
    copies = {name: _widened(tensor, dtype) for name, tensor in tensors.items()}
    if any(copies[name] is not tensor for name, tensor in tensors.items()):
        if any(map(is_distributed, tensors.values())):
            raise RuntimeError("the parameters are spread over processes, and are not copied for a replay")
        copies |= {name: buffer.clone() for name, buffer in buffers.items() if copies[name] is buffer}
        return functional_call(module, copies, args, kwargs)
    with buffers_kept(module):
        return module(*args, **kwargs)


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU, which later in-place operations of the block do not change."""
    return local(tensor).detach().clone().cpu()


def _widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a floating-point type at least as wide; others are left as they are."""
    if not tensor.is_floating_point() or torch.finfo(tensor.dtype).bits >= torch.finfo(dtype).bits:
        return tensor
    return tensor.to(dtype)
