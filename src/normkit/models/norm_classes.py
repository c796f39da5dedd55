"""The presets that the norm classes of transformers and torch should compute, declared whatever their code does."""

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
    """Class, such as "llama.LlamaRMSNorm" -> the preset that it computes; eps, gain and bias are those of a module."""
    presets = tomllib.loads((files("normkit.models") / FILE).read_text(encoding="utf-8"))
    return MappingProxyType({name: getattr(specs, preset) for preset, names in presets.items() for name in names})


def key_of(module: str, name: str) -> str:
    """The name of a class there, from its Python module and name: "llama.LlamaRMSNorm" or "torch.LayerNorm"."""
    parts = module.split(".")
    return f"{parts[2] if parts[:2] == ['transformers', 'models'] and len(parts) > 2 else parts[0]}.{name}"
