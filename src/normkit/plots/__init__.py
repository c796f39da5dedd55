"""A result -> Matplotlib figures, one function per figure; drawing computes only positions.

A figure function takes a result or the rows to show, and axes to draw into (a new figure without), and returns a
`Drawing`. `style("dark")` around the call draws for a dark page. Matplotlib is imported when a figure is drawn, never
when this package is.

    theme.py       the one palette (light and dark), the settings of every figure, the bytes of its file
    drawing.py     Drawing: a figure with its title, caption and description

    camera.py      from points in space to places on paper
    scene.py       sheets, balls, points and arrows, nearer things on top
    steps.py       the three steps of LayerNorm for three features
    spheres.py     LayerNorm of four features inside its hyperplane, RMSNorm's sphere
    clouds.py      BatchNorm's centring and LayerNorm's on one cloud
    axes.py        which numbers of a batch are normalized together
    invariance.py  the invariance table
    epsilons.py    eps inside the root and outside
    spectrum.py    singular values of the Jacobian

    depth.py       the axis over sites and blocks, log axes, legends, what a figure needs
    inspection.py  input scale, mean direction; `drawings`: all figures of an inspection
    gains.py       gain spectrum
    ellipsoid.py   the image of each norm over depth; the axes of one between the entries of its gain
    attention.py   attention logits, attention entropy

    course.py      numbers over the steps of a run, peaks kept and gaps marked
    training.py    the timeline of a run; `run_drawings`: all figures of a run
    profiles.py    gradients, stream and updates over depth, first and last
    drift.py       what all norms do over a run, and the one that moves most

    gallery.py     all of them with fixed data, and the page that shows them, for `normkit figures`

    stages.py      what each step of a norm leaves of a cloud, with its formula and what then holds
    timeline.py    when an animation is where
    film.py        the frame of a moment
    clips.py       frames as GIF or MP4
    animation.py   a norm of three features, step by step, as such a file
"""

from __future__ import annotations

from normkit.plots.animation import write_animation
from normkit.plots.attention import attention_entropy, attention_logits
from normkit.plots.axes import normalized_together
from normkit.plots.clouds import centred_clusters
from normkit.plots.drawing import Drawing
from normkit.plots.ellipsoid import ellipsoid_depth, interlacing
from normkit.plots.epsilons import two_epsilons
from normkit.plots.gains import gain_spectrum
from normkit.plots.inspection import drawings, input_scale, mean_direction
from normkit.plots.invariance import invariance_marks
from normkit.plots.spectrum import jacobian_spectra
from normkit.plots.spheres import hyperplane_steps, rms_sphere
from normkit.plots.steps import three_steps
from normkit.plots.theme import style

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
    "rms_sphere",
    "style",
    "three_steps",
    "two_epsilons",
    "write_animation",
]
