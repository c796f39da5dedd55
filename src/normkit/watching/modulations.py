"""The adaptive norms of a run: what was done to a part of their output in the newest measured step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from normkit.identification.sharding import local
from normkit.identification.tracing import first_tensor
from normkit.measurement.hooks import Hook
from normkit.measurement.instruments import Instruments
from normkit.measurement.modulation import Modulation, modulation_of

# Samples, places and channels of which a part is kept: 32 kB a norm.
_SAMPLES, _PLACES, _CHANNELS = 8, 16, 64


class RunModulations:
    """Hooks on adaptive norms and on what reads them; a part of both tensors stays on the device of the model.

    Args:
        model: The model, without its wrappers.
        readers: By path of a norm without a gain, the path of the module that reads its output.
        instruments: Tell which steps are measured, and whether a forward pass of training is running.
    """

    def __init__(self, model: nn.Module, readers: Mapping[str, str], instruments: Instruments) -> None:
        self._model, self._readers, self._instruments = model, readers, instruments
        self._waiting: dict[str, tuple[torch.Size, Tensor]] = {}
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    def install(self) -> None:
        """Put the hooks in; those of the instruments take them out."""
        failures, handles = self._instruments.failures, self._instruments.handles
        for norm, reader in self._readers.items():
            after, before = (
                Hook(failures, norm, partial(self._leave, norm)),
                Hook(failures, norm, partial(self._enter, norm)),
            )
            handles.append(self._model.get_submodule(norm).register_forward_hook(after))
            handles.append(self._model.get_submodule(reader).register_forward_pre_hook(before, with_kwargs=True))

    def found(self) -> tuple[Modulation, ...] | None:
        """As of the newest measured step, in forward order; None where no norm is known to be adaptive."""
        if not self._readers:
            return None
        read = (
            modulation_of(norm, self._readers[norm], *self._kept[norm]) for norm in self._readers if norm in self._kept
        )
        return tuple(each for each in read if each is not None)

    def _leave(self, norm: str, _module: nn.Module, _args: object, y: object) -> None:
        if not torch.compiler.is_compiling() and self._instruments.listens() and isinstance(y, Tensor):
            self._waiting[norm] = y.shape, _part(y)

    def _enter(self, norm: str, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if torch.compiler.is_compiling() or norm not in self._waiting:
            return
        (shape, left), x = self._waiting.pop(norm), first_tensor(args, kwargs)
        if x is not None and x.shape == shape:
            self._kept[norm] = left, _part(x)


def _part(x: Tensor) -> Tensor:
    x = local(x.detach())[:_SAMPLES]
    most = (*(_PLACES for _ in x.shape[1:-1]), _CHANNELS)
    steps = (slice(None, None, math.ceil(size / count)) for size, count in zip(x.shape[1:], most, strict=True))
    return x[(slice(None), *steps)].clone()
