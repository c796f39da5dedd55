"""Keras: LayerNormalization(rms_scaling=True) divides the row by its deviation, not by its root mean square.

    python census/finds/keras_rms_scaling.py SMOLLM2      the folder of SmolLM2-135M

The report is docs/wild/reports/keras_rms_scaling.md.
"""

from __future__ import annotations

import os
import warnings

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch

import normkit as nk
from patching import versions
from real_models import RealModel


def theirs(n, rms):
    if rms:
        layer = keras.layers.RMSNormalization(epsilon=1e-5)
    else:
        layer = keras.layers.LayerNormalization(epsilon=1e-5, rms_scaling=True)
    layer.build((None, n))
    return layer


def readings(title, layer):
    # Without the casts, which are left undecided.
    formula = str(nk.identify(layer, 64).spec).partition(" [")[0]
    print(f"  normkit, {title}: {formula}")
    row = torch.full((1, 64), 3.0) + torch.randn(1, 64)
    before, after = (rows.square().mean().sqrt() for rows in (row, layer(row)))
    print(f"  a row of mean 3 and deviation 1: root mean square {before:.2f} -> {after:.2f}")


def layers(model, rms):
    """Their layers with the gains of the model's norms."""
    made = {norm: theirs(len(norm.weight), rms) for norm in model.norms.values()}
    for norm, layer in made.items():
        layer.trainable_weights[0].assign(norm.weight.data)
    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(versions("torch", "keras", "transformers"))
    model = RealModel("smollm2", tokens=511, module="textwrap")
    reference = model.logits()
    print(f"transformers: perplexity {model.perplexity(reference):.3f}")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        theirs(4, rms=False)
    print(f"keras warns: {any('incorrectly' in str(each.message) for each in told)}")
    warnings.simplefilter("ignore")
    for title, rms in (("LayerNormalization(rms_scaling=True)", False), ("RMSNormalization()", True)):
        print(title)
        readings(title, theirs(64, rms))
        model.replace("SmolLM2-135M", layers(model, rms), reference)
