"""normkit: the normalization toolkit for PyTorch.

It shows what each normalization layer of a model does to its vectors, says when it is wrong, and
changes it with proof. Every public name is resolved on first use, so that importing normkit loads
nothing heavy, not even torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normkit import checkpoint, errors, geometry, plots, reference, specs, study, testing
    from normkit.checkpoint.loading import load
    from normkit.checkpoint.memory import Folding, fold
    from normkit.comparison.comparing import compare
    from normkit.comparison.differences import Comparison
    from normkit.comparison.torch_recorder import record
    from normkit.conversion.result import ConversionReport
    from normkit.conversion.swapping import convert, revert
    from normkit.explorer.exploration import Exploration, explore
    from normkit.functional import add_layer_norm, add_normalize, add_rms_norm, layer_norm, normalize, rms_norm
    from normkit.identification.behaviour import identify
    from normkit.identification.passport import Passport
    from normkit.identification.recorded_rows import identify_rows
    from normkit.inspection.inspecting import inspect
    from normkit.inspection.result import Inspection
    from normkit.layers import LayerNorm, Norm, RMSNorm
    from normkit.spec import NormSpec
    from normkit.watching.lightning import LightningWatch
    from normkit.watching.trainer import WatchCallback
    from normkit.watching.watcher import Watch, watch

# name -> the module that defines it; a name that is itself a module maps to that module.
_HOME = {
    "Comparison": "normkit.comparison.differences",
    "ConversionReport": "normkit.conversion.result",
    "Exploration": "normkit.explorer.exploration",
    "Folding": "normkit.checkpoint.memory",
    "Inspection": "normkit.inspection.result",
    "LayerNorm": "normkit.layers",
    "LightningWatch": "normkit.watching.lightning",
    "Norm": "normkit.layers",
    "NormSpec": "normkit.spec",
    "Passport": "normkit.identification.passport",
    "RMSNorm": "normkit.layers",
    "Watch": "normkit.watching.watcher",
    "WatchCallback": "normkit.watching.trainer",
    "add_layer_norm": "normkit.functional",
    "add_normalize": "normkit.functional",
    "add_rms_norm": "normkit.functional",
    "checkpoint": "normkit.checkpoint",
    "compare": "normkit.comparison.comparing",
    "convert": "normkit.conversion.swapping",
    "errors": "normkit.errors",
    "explore": "normkit.explorer.exploration",
    "fold": "normkit.checkpoint.memory",
    "geometry": "normkit.geometry",
    "identify": "normkit.identification.behaviour",
    "identify_rows": "normkit.identification.recorded_rows",
    "inspect": "normkit.inspection.inspecting",
    "layer_norm": "normkit.functional",
    "load": "normkit.checkpoint.loading",
    "normalize": "normkit.functional",
    "plots": "normkit.plots",
    "record": "normkit.comparison.torch_recorder",
    "reference": "normkit.reference",
    "revert": "normkit.conversion.swapping",
    "rms_norm": "normkit.functional",
    "specs": "normkit.specs",
    "study": "normkit.study",
    "testing": "normkit.testing",
    "watch": "normkit.watching.watcher",
}

__all__ = [
    "Comparison",
    "ConversionReport",
    "Exploration",
    "Folding",
    "Inspection",
    "LayerNorm",
    "LightningWatch",
    "Norm",
    "NormSpec",
    "Passport",
    "RMSNorm",
    "Watch",
    "WatchCallback",
    "add_layer_norm",
    "add_normalize",
    "add_rms_norm",
    "checkpoint",
    "compare",
    "convert",
    "errors",
    "explore",
    "fold",
    "geometry",
    "identify",
    "identify_rows",
    "inspect",
    "layer_norm",
    "load",
    "normalize",
    "plots",
    "record",
    "reference",
    "revert",
    "rms_norm",
    "specs",
    "study",
    "testing",
    "watch",
]


def __getattr__(name: str) -> object:
    """Import the home of a public name when it is first used."""
    if name == "__version__":
        version: str = import_module("normkit.text").own_version()
        return version
    if name not in _HOME:
        raise AttributeError(f"module 'normkit' has no attribute {name!r}")
    module = import_module(_HOME[name])
    value = module if _HOME[name] == f"normkit.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted({*__all__, "__version__"})
