"""Checkpoints: loaded without running code of theirs, and folded exactly, with proof.

    hub.py model_folder.py reader.py    a model's folder; its files; safetensors read a few rows at a time
    opening.py                          config.json checked; a folder with its graph of readers and writers
    build_model.py loading.py           models that transformers builds, with recorded norms replaced; `load`
    misfits.py                          layers that only the file or only the model has
    offloading.py                       models whose weights stay in their files

    plan.py plan_builder.py planning.py what becomes of each tensor, as data; how it is decided
    affine.py centring.py               the operations: gains and biases; means, and LayerNorms that become RMSNorms
    migration.py activations.py         scales for the channels of norms; the statistics that they are made of
    scaling.py headroom.py              the residual stream halved; how often it has to be
    rotation.py                         stream and values rotated
    hadamard.py orthogonal.py           random matrices; matrices of a file
    given.py given_files.py             what the user gives beside a checkpoint
    rotated_rows.py                     rotated matrices made of rows of the source
    arithmetic.py matrices.py           one rounding per number; matrices made of rows of the source
    applying.py                         a plan carried out
    memory.py                           `normkit.fold`: on a model
    batch_norms.py channel_maps.py      its batch norms; a scale and a shift moved into a convolution
    dataflow.py                         which module gives a tensor, and what reads it
    folding.py shard.py staging.py      `fold`: on a folder, streamed by several threads, resumable

    certificate.py limits.py            what was done to each tensor; what that does not prove
    verification.py derivation.py       `verify`, from the files alone; every tensor made again
    logits.py                           logits in true float64, of two models

Public names are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normkit.checkpoint.activations import ActivationMeter, ActivationStatistics, measure_activations
    from normkit.checkpoint.certificate import Certificate
    from normkit.checkpoint.folding import fold
    from normkit.checkpoint.verification import Verification, verify

_HOME = {
    "ActivationMeter": "activations",
    "ActivationStatistics": "activations",
    "Certificate": "certificate",
    "Verification": "verification",
    "fold": "folding",
    "measure_activations": "activations",
    "verify": "verification",
}

__all__ = [
    "ActivationMeter",
    "ActivationStatistics",
    "Certificate",
    "Verification",
    "fold",
    "measure_activations",
    "verify",
]


def __getattr__(name: str) -> object:
    """Import the home of a public name when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module 'normkit.checkpoint' has no attribute {name!r}")
    value = getattr(import_module(f"normkit.checkpoint.{_HOME[name]}"), name)
    globals()[name] = value
    return value
