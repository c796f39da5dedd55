"""Flat figures: invariances, the places of epsilon, a Jacobian's singular values, an ellipsoid's axes, a batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from normkit import specs
from normkit.conventions.eps import PLACEMENTS, EpsPlacement
from normkit.errors import InputError, ShapeError
from normkit.geometry.centring import helmert
from normkit.geometry.image import image_of
from normkit.geometry.invariance import InvarianceTable
from normkit.geometry.quotient import Quotient
from normkit.geometry.scaling import agreement_scale, shrink_factor
from normkit.geometry.spectrum import jacobian_spectrum
from normkit.show import theme
from normkit.show.axes import disc_or_ring, figure_of, log_axis, new_axes, panels
from normkit.show.drawing import Drawing
from normkit.show.scene import Camera, Scene, frame
from normkit.show.theme import colour
from normkit.spec import NormSpec
from normkit.text import significant, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NORMS = {"batch": "BatchNorm", "weight": "WeightNorm", "layer": "LayerNorm", "rms": "RMSNorm"}
_SYMBOLS = {"^T": "ᵀ", "_1": "₁", "'": "′"}
_CURVES: tuple[tuple[EpsPlacement, str, str], ...] = (
    ("inside", "inside:\n√(v + ε)", "accent"),
    ("outside", "outside:\n√v + ε", "contrast"),
)
_SHARES = torch.linspace(0, 1, 61, dtype=torch.float64)
_CAMERA = Camera(azimuth=-52.0, elevation=24.0)
_SAMPLES, _FEATURES, _TOKENS = 3, 6, 4


def invariance_marks(table: InvarianceTable, ax: Axes | None = None) -> Drawing:
    """A full disc where the output does not change, a ring where it does, each with the measured change.

    Args:
        table: Of `normkit.geometry.invariances`.
        ax: Where to draw, or None for a new figure.
    """
    rows = len(table.rows)
    names = [_NORMS.get(norm, norm) for norm in table.norms]
    with theme.style():
        ax = ax or new_axes(7.2, 0.55 * (rows + 1.8))
        ax.set_axis_off()
        ax.set_xlim(-2.6, len(names) - 0.4)
        ax.set_ylim(rows + 0.25, -1.0)
        small: Any = {"va": "center", "fontsize": 8.5, "color": colour("muted")}
        for column, name in enumerate(names):
            ax.text(column - 0.32, -0.72, name, va="center", weight="bold")
        for place, row in enumerate(table.rows):
            formula = row.what
            for plain, symbol in _SYMBOLS.items():
                formula = formula.replace(plain, symbol)
            ax.axhline(place - 0.5, color=colour("line"), linewidth=0.8)
            ax.text(-2.6, place - 0.14, row.transformation, va="center")
            ax.text(-2.6, place + 0.2, formula, **small)
            for column, cell in enumerate(row.cells):
                disc_or_ring(ax, column - 0.22, place, holds=cell.is_invariant)
                ax.text(column - 0.05, place, significant(cell.error), **small)
        ax.axhline(rows - 0.5, color=colour("line"), linewidth=0.8)
        for left, is_invariant, words in ((-2.52, True, "stays the same"), (-1.25, False, "changes")):
            disc_or_ring(ax, left, rows - 0.05, holds=is_invariant)
            ax.text(left + 0.17, rows - 0.05, words, va="center", fontsize=9)
        words = "numbers: largest change over largest output"
        ax.text(-0.32, rows - 0.05, words, va="center", fontsize=9, color=colour("muted"))
    unchanged = {
        name: [row.transformation for row in table.rows if row.cells[place].is_invariant]
        for place, name in enumerate(names)
    }
    return Drawing(
        name="invariances",
        figure=figure_of(ax),
        title="What each norm does not notice",
        caption="A full disc: the output stays the same to the last digits (below "
        f"{significant(table.tolerance)}) when weights or data are changed so; a ring: it changes, by this share.",
        description=" ".join(f"{name} ignores {', '.join(found) or 'nothing'}." for name, found in unchanged.items()),
    )


def two_epsilons(eps: float = 1e-5, axes: Sequence[Axes] | None = None) -> Drawing:
    """How long a scaled row comes out, and what it lacks, over the row's rms, with eps inside and outside the root.

    Args:
        eps: The one number, between 0 and 1.
        axes: Two axes to draw into, or None for a new figure.

    Raises:
        InputError: If eps is not between 0 and 1.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    if not 0.0 < eps < 1.0:
        raise InputError(f"eps must lie between 0 and 1 for the two places to agree anywhere, got {eps!r}")
    scale = torch.logspace(math.log10(eps) - 2.5, 1.0, 401, dtype=torch.float64)
    same = agreement_scale(eps)
    loss = 1.0 - float(shrink_factor(torch.tensor([same], dtype=torch.float64), eps=eps))
    factors = {placement: scale / PLACEMENTS[placement].scale_of_root(scale, eps) for placement, _, _ in _CURVES}
    half = {placement: float(scale[(factor - 0.5).abs().argmin()]) for placement, factor in factors.items()}
    with theme.style():
        kept, lost = panels(1, 2, 3.3, given=axes)
        for placement, label, name in _CURVES:
            kept.plot(scale, factors[placement], color=colour(name))
            lost.plot(scale, 1 - factors[placement], color=colour(name))
            shift, side = ((-6, 42), "right") if placement == "outside" else ((7, -9), "left")
            beside: Any = {"textcoords": "offset points", "color": colour(name), "ha": side}
            kept.annotate(label, (half[placement], 0.5), shift, **beside)
        for ax in (kept, lost):
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(numticks=6))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.set_xlim(eps * 10**-2.5, 10)
            ax.set_xlabel("rms of the row, √v")
        kept.set_title("What is left", loc="left")
        kept.set_ylabel("length of the result / √n")
        kept.set_ylim(0, 1.04)
        lost.set_title("What is missing", loc="left")
        lost.set_yscale("log")
        lost.yaxis.set_major_locator(LogLocator(numticks=6))
        lost.yaxis.set_minor_locator(NullLocator())
        lost.set_ylabel("1 − length / √n")
        lost.set_ylim(eps * 1e-3, 3)
        lost.plot(same, loss, "o", markersize=6, color=colour("paper"), markeredgecolor=colour("ink"), zorder=5)
        words = f"equal at rms {significant(same)},\n(1 − ε) / 2"
        below: Any = {"textcoords": "offset points", "fontsize": 9, "ha": "right", "va": "top"}
        lost.annotate(words, (same, loss), (-10, -2), **below)
    return Drawing(
        name="two-epsilons",
        figure=figure_of(kept),
        title=f"One epsilon, two places: ε = {significant(eps)} inside or outside the root",
        caption="A row much shorter than ε's own scale is not brought to length √n. Inside the root that scale is √ε, "
        "outside it is ε; the two agree at one row only, with an rms near one half.",
        description=f"Inside the root half the length is lost at an rms of {significant(half['inside'])}, outside at "
        f"{significant(half['outside'])}. Both lose {significant(loss)} at {significant(same)}; of longer rows "
        "outside takes more.",
    )


def jacobian_spectra(x: Tensor, eps: float, axes: Sequence[Axes] | None = None) -> Drawing:
    """All singular values of the Jacobians of LayerNorm and RMSNorm at one row, without and with eps.

    Args:
        x: One row of shape (n,), n from 4 on.
        eps: Inside the root, in units of x squared.
        axes: Two axes to draw into, or None for a new figure.

    Raises:
        ShapeError: If x is not one row of at least 4 features.
    """
    if x.dim() != 1 or len(x) < 4:
        raise ShapeError(f"one row of shape (n,) with n >= 4 is needed, got {tuple(x.shape)}")
    norms = {"LayerNorm": specs.TORCH_LAYER_NORM, "RMSNorm": specs.TORCH_RMS_NORM}
    n = len(x)
    values = {
        name: [jacobian_spectrum(x, spec.replace(eps=e)).singular_values(n) for e in (0.0, eps)]
        for name, spec in norms.items()
    }
    places = range(1, n + 1)
    with theme.style():
        both = panels(1, 2, 3.2, given=axes)
        said: Any = {"textcoords": "offset points", "fontsize": 9}
        quiet = {"color": colour("muted"), **said}
        dots: Any = {"linestyle": "none", "marker": "o", "markersize": 6, "clip_on": False}
        ring: Any = {"markerfacecolor": "none", "markeredgecolor": colour("contrast"), "markeredgewidth": 1.4}
        for ax, (name, (bare, damped)) in zip(both, values.items(), strict=True):
            ax.vlines(places, 0, damped, colors=colour("accent"), linewidth=1.6)
            ax.plot(places, damped, color=colour("accent"), zorder=3, **dots)
            ax.plot(places, bare, zorder=4, **dots, **ring)
            ax.set_xlim(-0.7, n + 2.2)
            ax.grid(visible=False)
            ax.set_xticks(list(places))
            ax.set_ylim(0, 1.3 * max(float(pair[0].max()) for pair in values.values()))
            ax.set_xlabel("direction, least stretched first")
            ax.set_title(name, loc="left")
            radial, where = (2, "x − mean") if name == "LayerNorm" else (1, "x itself")
            if radial == 2:
                ax.annotate("all-ones:\n0", (1, 0), (0, 8), ha="center", **quiet)
            ax.annotate(f"{where}:\nε / s³", (radial, float(damped[radial - 1])), (5, 7), ha="right", **quiet)
            middle = (radial + 1 + n) / 2
            ax.annotate(f"all {n - radial} others: 1 / s", (middle, float(bare[-1])), (0, 10), ha="center", **quiet)
            ax.annotate("ε = 0", (n, float(bare[-1])), (8, 0), va="center", color=colour("contrast"), **said)
            ax.annotate(f"ε = {eps:g}", (n, float(damped[-1])), (8, 0), va="center", color=colour("accent"), **said)
        both[0].set_ylabel("stretch |dy| / |dx| (singular value)")
    lines = (f"{name}: {_listed(pair[0])} at eps 0, {_listed(pair[1])} with eps." for name, pair in values.items())
    return Drawing(
        name="jacobian-spectrum",
        figure=figure_of(both[0]),
        title="What a norm lets through of a small change",
        caption="A change along the vector itself is (all but) stopped, and LayerNorm also stops one along all-ones; "
        "every other direction passes, divided by the scale s.",
        description=" ".join(lines),
    )


def _listed(values: Tensor) -> str:
    """Each value once, with its number of occurrences."""
    words = Counter(map(significant, values.tolist()))
    return ", ".join(word if count == 1 else f"{word} ({count} times)" for word, count in words.items())


def interlacing(weight: Tensor, spec: NormSpec, name: str = "", ax: Axes | None = None) -> Drawing:
    """The sorted semi-axes of one gain's ellipsoid between the sorted entries of that gain.

    Args:
        weight: Gain as stored, of shape (n,).
        spec: A norm that centres.
        name: Of the norm, for the words.
        ax: Where to draw, or None for a new figure.

    Raises:
        InputError: If the norm does not centre.
    """
    if not spec.centring.is_full:
        raise InputError("without centring the semi-axes are the gain's entries themselves; give a norm that centres")
    surface = image_of(spec, len(weight), weight).surface
    entries = surface.gain.double().abs().sort().values
    axes = surface.semi_axes().double() / float(surface.radius or 1.0)
    # A gain of zero removes an axis; its place stays, at zero.
    axes = torch.cat([axes.new_zeros(len(entries) - 1 - len(axes)), axes])
    last = len(axes)
    places = range(1, last + 1)
    with theme.style():
        ax = ax or new_axes()
        bar: Any = {"linewidth": max(1.5, min(5.0, 330 / len(entries))), "alpha": 0.45, "zorder": 2}
        ax.vlines(places, entries[:-1], entries[1:], colors=colour("contrast"), **bar)
        size = max(2.0, min(5.0, 230 / len(entries)))
        ax.plot(places, axes, linestyle="none", marker="o", markersize=size, color=colour("accent"), zorder=3)
        if float(entries[0]) > 0 and float(entries[-1] / entries[0]) > 30:
            log_axis(ax, [*entries.tolist(), *axes.tolist()])
        said: Any = {"textcoords": "offset points", "va": "center"}
        # The words for the bars are beside the largest gap of the lower half.
        gap = int(entries.diff()[: last // 2 + 1].argmax())
        at = (gap + 1, float(entries[gap : gap + 2].mean()))
        ax.annotate("from one |g| of the gain to the next", at, (12, -6), color=colour("contrast"), **said)
        place = last * 3 // 5
        at = (place + 1, float(axes[place]))
        ax.annotate("semi-axis / √n", at, (-6, 16), color=colour("accent"), ha="right", **said)
        ax.set_xlim(0, last + 1)
        ax.set_ylabel("|g| and semi-axis / √n")
        ax.set_xlabel("axis of the ellipsoid, shortest first")
    where = f" Here: {name}." if name else ""
    return Drawing(
        name="interlacing",
        figure=figure_of(ax),
        title="The axes of an ellipsoid lie between the entries of its gain",
        caption="Centring takes one dimension, so n entries of the gain leave n − 1 axes: one between each two "
        f"neighbouring entries, by size.{where}",
        description=f"{last} semi-axes over {spread(axes.tolist())} times √n, between {len(entries)} entries over "
        f"{spread(entries.tolist())}.",
    )


def quotient_paths(x: Tensor, y: Tensor, eps: float, axes: Sequence[Axes] | None = None) -> Drawing:
    """The shortest path between two rows of three features as LayerNorm sees them, without and with eps; a step.

    Everything lies in the plane of rows with mean 0, which is seen along all-ones.

    Args:
        x: A row of shape (3,), not constant.
        y: Another.
        eps: Of the second panel, above 0, inside the root.
        axes: Three axes to draw into, or None for a new figure.

    Raises:
        ShapeError: If x or y is not a row of 3 features.
    """
    from matplotlib.patches import Circle

    if x.shape != (3,) or y.shape != (3,):
        raise ShapeError(f"two rows of shape (3,) are needed, got {tuple(x.shape)} and {tuple(y.shape)}")
    x, y = x.double(), y.double()
    sphere, ball = (Quotient(specs.TORCH_LAYER_NORM.replace(eps=each)) for each in (0.0, eps))
    radius = math.sqrt(3)
    ends = torch.stack([x, y])
    straight = torch.lerp(x, y, _SHARES[:, None])
    arc, chord = float(sphere.distance(x, y)), float(ball.distance(x, y))
    weights = radius * torch.stack([0.5 * x, x, 2 * x]) / (x - x.mean()).norm()
    # A loss whose slope at the middle weight is half as long as that weight; every slope is across its weight.
    across = sphere.horizontal(weights, y)
    steps = across / across.norm(dim=-1, keepdim=True) * radius * torch.tensor([[1.0], [0.5], [0.25]]).double()
    turns = torch.rad2deg(sphere.distance(weights, weights + steps) / radius).tolist()
    with theme.style():
        first, second, third = panels(1, 3, 2.75, given=axes)
        said: Any = {"textcoords": "offset points", "fontsize": 8.5}

        def draw(ax: Axes, rows: Tensor, name: str, **options: Any) -> None:
            ax.plot(*(rows @ helmert(3)).mT, color=colour(name), **options)

        def reach(ax: Axes, title: str, words: str, far: float) -> None:
            ax.set_axis_off()
            ax.set_aspect("equal")
            ax.set_xlim(-1.05 * radius, far)
            ax.set_ylim(-1.05 * radius, far)
            ax.annotate(title, (0, 1), (0, 20), xycoords="axes fraction", weight="bold", **said)
            ax.annotate(words, (0, 1), (0, 8), xycoords="axes fraction", color=colour("muted"), **said)
            ax.plot(0, 0, "o", color=colour("paper"), markeredgecolor=colour("muted"), markersize=4, zorder=4)

        far = 1.08 * float((ends @ helmert(3)).max())
        for ax, manifold, title, words in (
            (first, sphere, "ε = 0: each ray is one point", f"shortest path: an arc, {significant(arc)}"),
            (second, ball, f"ε = {eps:g}: each row is one", f"shortest path: a chord, {significant(chord)}"),
        ):
            reach(ax, title, words, far)
            is_sphere = manifold is sphere
            face: Any = {"facecolor": "none" if is_sphere else colour("surface"), "edgecolor": colour("muted")}
            ax.add_patch(Circle((0, 0), radius, **face, linestyle="-" if is_sphere else (0, (3, 2)), zorder=1))
            for row in ends:
                far_end = 3 * row if is_sphere else row
                draw(ax, torch.stack([0 * row, far_end - far_end.mean()]), "line", linewidth=1.0, zorder=2)
            between = manifold.interpolate(x, y, _SHARES)
            draw(ax, straight - straight.mean(-1, keepdim=True), "muted", linewidth=1.2, linestyle=(0, (4, 2)))
            draw(ax, between - between.mean(-1, keepdim=True), "contrast", linewidth=1.4)
            draw(ax, manifold.point(between), "accent", linewidth=2.2)
            for rows, name in ((ends, "contrast"), (manifold.point(ends), "accent")):
                flat = rows - rows.mean(-1, keepdim=True)
                draw(ax, flat, name, linestyle="none", marker="o", markersize=5, zorder=5)
        reach(third, "One step of descent", "turns a long weight less", 2.4 * radius)
        third.add_patch(Circle((0, 0), radius, facecolor="none", edgecolor=colour("line"), zorder=1))
        for weight, step, turn in zip(weights - weights.mean(-1, keepdim=True), steps, turns, strict=True):
            end = weight + step
            draw(third, torch.stack([0 * weight, weight]), "line", linewidth=1.0)
            draw(third, torch.stack([0 * end, end]), "line", linewidth=1.0)
            draw(third, torch.stack([weight, end]), "contrast", linewidth=1.8)
            draw(third, weight[None], "accent", linestyle="none", marker="o", markersize=5, zorder=5)
            place = tuple((end @ helmert(3)).tolist())
            third.annotate(f"{turn:.0f}°", place, (5, 0), color=colour("contrast"), **said)
    return Drawing(
        name="quotient-paths",
        figure=figure_of(first),
        title="Rows that LayerNorm cannot tell apart are one point",
        caption="Two rows (orange) and their outputs (blue), seen along all-ones, with the shortest path between them; "
        "dashed: the straight line of rows. With ε the circle is out of reach and the path goes through its inside. "
        "Right: the slope of a loss is across the weight, and half as long at twice the length.",
        description=f"Without eps the path is an arc of length {significant(arc)} on the circle of radius 1.73; with "
        f"eps {eps:g} a straight chord of length {significant(chord)} inside it. Weights of half, once and "
        f"twice the radius turn by {', '.join(f'{turn:.0f}' for turn in turns)} degrees in one step.",
    )


def normalized_together(axes: Sequence[Axes] | None = None) -> Drawing:
    """A block of samples, tokens and features, drawn twice: the group of BatchNorm, and that of LayerNorm or RMSNorm.

    Args:
        axes: Two axes to draw into, or None for a new figure.
    """
    from matplotlib.patches import Polygon

    cells = list(product(range(_SAMPLES), range(_FEATURES), range(_TOKENS)))
    batch = {cell for cell in cells if cell[1] == 1}
    row = {cell for cell in cells if cell[0] == _SAMPLES - 1 and cell[2] == _TOKENS - 1}
    # The camera is on the side of high samples, low features and high tokens: axis, last cell, its face, its shade.
    sides = ((0, _SAMPLES - 1, 1, 0.80), (1, 0, 0, 0.62), (2, _TOKENS - 1, 1, 1.0))
    with theme.style():
        scenes = [Scene(ax, _CAMERA) for ax in panels(1, 2, 3.6, given=axes)]
        batch_words = "one feature, over all samples and tokens:\na vector's result depends on its neighbours"
        scenes[0].heading("BatchNorm", batch_words)
        scenes[1].heading(
            "LayerNorm, RMSNorm", "one token's vector, over its features:\nnothing else in the batch matters"
        )
        paper = colour("paper")
        edge: Any = {"edgecolor": paper, "linewidth": 0.9, "zorder": 2}
        for scene, chosen in zip(scenes, (batch, row), strict=True):
            for cell, (axis, last, far, shade) in product(cells, sides):
                if cell[axis] != last:
                    continue
                one, other = np.delete(np.eye(3), axis, axis=0)
                start = np.array(cell, dtype=float) + far * np.eye(3)[axis]
                place = scene.camera.paper(np.array([start, start + one, start + one + other, start + other]))
                name, opacity = ("accent", shade) if cell in chosen else ("line", 0.75 * shade)
                scene.ax.add_patch(Polygon(place, facecolor=paper, **edge))
                scene.ax.add_patch(Polygon(place, facecolor=colour(name), alpha=opacity, **edge))
            scene.label(np.array([_SAMPLES / 2, 0.0, 0.0]), "samples", shift=(-6, -9), ha="right")
            scene.label(np.array([_SAMPLES, _FEATURES / 2, 0.0]), "features", shift=(8, -9), ha="left")
            scene.label(np.array([0.0, 0.0, _TOKENS / 2]), "tokens", shift=(-6, 0), ha="right")
        frame(scenes, np.array(list(product((-0.9, _SAMPLES), (-0.9, _FEATURES), (-0.3, _TOKENS + 0.2)))))
    return Drawing(
        name="normalized-together",
        figure=figure_of(scenes[0].ax),
        title="Which numbers share one mean and one spread",
        caption="Each small cube is one number; the coloured ones are normalized together. BatchNorm mixes the samples "
        "of a batch, LayerNorm and RMSNorm look at one vector only, in training and in use alike.",
        description="Two blocks of samples by features by tokens. In the first a slab of one feature is coloured, in "
        "the second a bar of one token's features.",
    )
