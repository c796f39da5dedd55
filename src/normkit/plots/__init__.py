"""A result -> Matplotlib figures, one function per figure.

A figure function takes a result or the rows to show, and axes to draw into (a new figure without), and returns a
`Drawing`. `style("dark")` around the call draws for a dark page. Matplotlib is imported when a figure is drawn, never
when this package is.

Each figure lies beside what computes its numbers, and `normkit.show` holds what all share. `gallery.py` draws the
figures of `normkit figures`, and the page that shows them.
"""

from __future__ import annotations

from normkit.geometry.animation import write_animation
from normkit.geometry.figures import (
    interlacing,
    invariance_marks,
    jacobian_spectra,
    normalized_together,
    quotient_paths,
    two_epsilons,
)
from normkit.geometry.space_figures import centred_clusters, hyperplane_steps, rms_sphere, three_steps
from normkit.inspection.figures import (
    attention_entropy,
    attention_logits,
    drawings,
    ellipsoid_depth,
    gain_spectrum,
    input_scale,
    mean_direction,
)
from normkit.show.drawing import Drawing
from normkit.show.theme import style

__all__ = [
    "Drawing",
    "attention_entropy",
    "attention_logits",
    "centred_clusters",
    "drawings",
    "ellipsoid_depth",
    "gain_spectrum",
    "hyperplane_steps",
    "input_scale",
    "interlacing",
    "invariance_marks",
    "jacobian_spectra",
    "mean_direction",
    "normalized_together",
    "quotient_paths",
    "rms_sphere",
    "style",
    "three_steps",
    "two_epsilons",
    "write_animation",
]
