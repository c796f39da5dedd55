"""The parameters of a model as they are stored, in a file, a folder or memory; nothing is run to read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from normkit.checkpoint.reader import Source


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """Named tensors, what is written beside them, and the runtime that stores tensors in this way."""

    name: str
    """As the user gave it."""
    runtime: str
    """Who reads this form: "transformers", "llama.cpp", "MLX", "ONNX", or "" for tensors of unknown origin."""
    source: Source
    """The tensors, which are read a few rows at a time."""
    architecture: str = ""
    """The model's architecture as the form names it, such as "gemma3"; "" if nothing names it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The content of config.json, or the metadata of the file."""
    eps: Mapping[str, float] = field(default_factory=dict)
    """Path of a norm -> its eps as stored; under "" that of all others."""
    adds: Mapping[str, float] = field(default_factory=dict)
    """Path of a norm -> what is added to its stored gain, where the file itself says so, as a graph does."""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a tensor here -> its possible names in transformers, the likeliest first, where the runtime has a table
    of names; a model has one of them."""
    notes: tuple[str, ...] = ()
    """Remarks for the user."""
