"""What the norm classes of transformers and torch are declared to compute, whatever their code does at the moment."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from normkit import specs
from normkit.spec import NormSpec

FILE = "norm_classes.toml"


@cache
def declared() -> Mapping[str, NormSpec]:
    """Class, as in "llama.LlamaRMSNorm", to the preset that it is; eps, gain and bias are those of a module."""
    presets = tomllib.loads((files("normkit.models") / FILE).read_text(encoding="utf-8"))
    return MappingProxyType({name: getattr(specs, preset) for preset, names in presets.items() for name in names})


def key_of(module: str, name: str) -> str:
    """How a class of a Python module is called there, as in "llama.LlamaRMSNorm" or "torch.LayerNorm"."""
    parts = module.split(".")
    return f"{parts[2] if parts[:2] == ['transformers', 'models'] and len(parts) > 2 else parts[0]}.{name}"
