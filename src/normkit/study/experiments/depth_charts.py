"""What the study `depth` shows."""

from __future__ import annotations

from collections.abc import Mapping

from normkit.study.chart import Chart, Curves, Line, line
from normkit.study.curves import curve
from normkit.study.result import Paired, Settings, integer

VARIANTS = ("no norm", "post", "pre", "peri", "DeepNorm", "depth-scaled")
"""Arms that are measured at the start, in the order of the legend."""

NORMED = VARIANTS[1:]
"""Those with a norm: beside one without, nothing of how they differ is to be seen."""

LONG = "pre, longer windows"
"""One more arm at the start."""

TRAINED = ("pre", "no norm")
"""Those that are trained as well."""


def charts(settings: Settings, measured: Mapping[int, Paired]) -> tuple[Chart, ...]:
    """The stream and the gradients block by block, gradient and change over depth, the losses.

    Args:
        settings: Of the study.
        measured: Seed -> arm -> what it gave.
    """
    seeds = list(measured.values())

    def over_depth(quantity: str) -> tuple[Line, ...]:
        depths = seeds[0]["pre"]["depths"]
        return tuple(line(name, depths, [curve(paired[name][quantity]) for paired in seeds]) for name in NORMED)

    def over_blocks(quantity: str, first: int) -> tuple[Line, ...]:
        blocks = range(first, first + len(seeds[0]["pre"][quantity]))
        return tuple(line(name, blocks, [curve(paired[name][quantity]) for paired in seeds]) for name in VARIANTS)

    steps = range(1, integer(settings, "steps") + 1)
    trained = settings["trained_layers"]
    assert isinstance(trained, tuple)
    return (
        Curves(
            name="depth-stream",
            title="Activations at the start, block by block",
            caption="Mean square of the stream after each block of the deepest model; block 0 is the embedding.",
            description="Without a norm it grows by a factor a block; pre and peri grow in a line, post stays at 1.",
            x_label="block",
            y_label="E|x|^2 / n",
            panels=(("", over_blocks("deepest_stream", 0)),),
            y_log=True,
        ),
        Curves(
            name="depth-gradient",
            title="Gradient of the last MLP against depth",
            caption="Gradient norm of its two matrices under the loss of one token; a power law is a line.",
            description="Post is level; pre, peri and DeepNorm fall like the inverse root of the depth.",
            x_label="layers",
            y_label="gradient norm",
            panels=(("", over_depth("last_gradient")),),
            x_log=True,
            y_log=True,
        ),
        Curves(
            name="depth-blocks",
            title="Gradients at the start, block by block",
            caption="Norm of the gradient of each block's MLP in the deepest model; what left float32 is at the edge.",
            description="With norms all blocks lie within a factor of about ten; without one the first overflow.",
            x_label="block",
            y_label="gradient norm",
            panels=(("", over_blocks("deepest_gradients", 1)),),
            y_log=True,
        ),
        Curves(
            name="depth-change",
            title="Change of the output when all matrices change by one part in a thousand",
            caption="Mean squared change of what the unembedding reads, over the square of the relative change.",
            description="Post rises faster than the depth, pre like its logarithm, DeepNorm falls.",
            x_label="layers",
            y_label="change / relative change^2",
            panels=(("", over_depth("change")),),
            x_log=True,
            y_log=True,
        ),
        Curves(
            name="depth-training",
            title="Training with and without norm",
            caption="Loss without warm-up; both arms of a panel see the same batches.",
            description="At few layers the lines lie together; at many the model without a norm starts far above.",
            x_label="step",
            y_label="loss (nats a byte)",
            panels=tuple(
                (
                    f"{layers} layers",
                    tuple(
                        line(
                            name,
                            steps,
                            [curve(paired[f"{name}, {layers} layers trained"]["losses"]) for paired in seeds],
                        )
                        for name in TRAINED
                    ),
                )
                for layers in trained
            ),
            y_log=True,
        ),
    )
