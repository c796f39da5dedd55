"""Checkpoints: loaded without running what lies in them, and folded exactly, with proof.

    configuration.py hub.py weights.py fitting.py silence.py    from a folder or a Hub id to a model of transformers
    loading.py swaps.py                     `load`; norms that no stock class has, recorded in config.json

    header.py source.py                     safetensors read a few rows at a time; a model in memory likewise
    opening.py                              a folder with its graph of readers and writers

    plan.py                                 what becomes of each tensor, as data
    planning.py request.py draft.py         how it is decided
    gains.py streams.py values.py           gains and biases; centring and RMSNorms; the bias of values

    arithmetic.py applying.py               one rounding a number; a plan carried out
    memory.py                               `normkit.fold`: on a model
    folding.py writing.py shard.py layout.py staging.py carrying.py     `fold`: on a folder, streamed, resumable

    certificate.py verifying.py             what was done to each tensor; `verify`, from the files alone
    reloading.py precision.py               does the stock class load it; logits in true float64

Public names are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normkit.checkpoint.certificate import Certificate
    from normkit.checkpoint.folding import fold
    from normkit.checkpoint.verification import Verification
    from normkit.checkpoint.verifying import verify

_HOME = {"Certificate": "certificate", "Verification": "verification", "fold": "folding", "verify": "verifying"}

__all__ = ["Certificate", "Verification", "fold", "verify"]


def __getattr__(name: str) -> object:
    """Import the home of a public name when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module 'normkit.checkpoint' has no attribute {name!r}")
    value = getattr(import_module(f"normkit.checkpoint.{_HOME[name]}"), name)
    globals()[name] = value
    return value
