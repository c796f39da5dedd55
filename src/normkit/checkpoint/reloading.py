"""Whether transformers itself would load a checkpoint whole, found out from names and shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from normkit.checkpoint import swaps
from normkit.checkpoint.configuration import CONFIG, read_config
from normkit.checkpoint.header import TensorInfo, read_header
from normkit.checkpoint.weights import weight_files


@dataclass(frozen=True, kw_only=True, slots=True)
class Reload:
    """What transformers says when it loads a folder.

    Attributes:
        class_name: The class that the configuration names.
        missing: Names of weights that the class has and the folder lacks.
        unexpected: Names of weights that the class does not use.
        mismatched: Names of weights of another shape.
        ran: Whether it was tried.
        reason: Why it was not, or nothing.
    """

    class_name: str
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    ran: bool = True
    reason: str = ""

    @property
    def is_whole(self) -> bool:
        """It ran, and every weight found its place."""
        return self.ran and not (self.missing or self.unexpected or self.mismatched)


def reload_check(folder: Path) -> Reload:
    """What transformers would say of a folder: its configuration, and safetensors.

    Raises:
        ModelError: If transformers cannot build the model, or the record fits it not; one line.
    """
    tensors = {name: held for file in weight_files(folder) for name, held in read_header(file).items()}
    return reload_of(read_config(folder), tensors, folder)


def reload_of(values: Mapping[str, Any], tensors: Mapping[str, TensorInfo], folder: Path) -> Reload:
    """Have transformers load a checkpoint on the meta device, and the norms replaced that it records as replaced.

    No weight is read and none is allocated, whatever their size; nothing has to be written yet.

    Args:
        values: Its configuration.
        tensors: Name -> dtype and shape of its weights.
        folder: Named in messages.

    Raises:
        ModelError: If transformers cannot build the model, or the record fits it not; one line.
    """
    name = values["architectures"][0]
    if find_spec("accelerate") is None:
        return Reload(class_name=name, ran=False, reason="accelerate is not installed")
    import torch

    from normkit.checkpoint.fitting import fit
    from normkit.checkpoint.silence import silence
    from normkit.checkpoint.source import TORCH

    norms = swaps.recorded(values, folder / CONFIG)
    if strange := next((tensor for tensor, held in tensors.items() if held.dtype not in TORCH), None):
        reason = f"{strange} is {tensors[strange].dtype}, which torch has not"
        return Reload(class_name=name, ran=False, reason=reason)
    empty = {
        tensor: torch.empty(held.shape, dtype=TORCH[held.dtype], device="meta") for tensor, held in tensors.items()
    }
    with silence():
        found = fit(dict(values), empty, folder, or_body=False, device_map="meta")
    swaps.replay(found.model, norms, folder / CONFIG)
    return Reload(
        class_name=found.asked,
        missing=tuple(found.missing),
        unexpected=tuple(found.unexpected),
        mismatched=tuple(mismatched[0] for mismatched in found.mismatched),
    )
