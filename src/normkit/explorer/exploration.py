"""`explore`: a page that shows what a norm does to points or to the activations of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit import specs
from normkit.errors import InputError, KindError, SpecError
from normkit.explorer.activations import Activations, SiteActivations
from normkit.explorer.conventions import Convention, convention_of
from normkit.explorer.document import clouds, document
from normkit.explorer.points import BUDGET, Points, checked, label_text, vector
from normkit.explorer.projection import principal_basis, site_record
from normkit.files import write_text
from normkit.measurement.sampling import evenly
from normkit.show.embedding import frame
from normkit.spec import NormSpec

TITLE = "The geometry of normalization"

_SCENES = {3: "three", 4: "four"}
_LARGEST_SLIDER = 100.0
_FRAME_HEIGHT = 760
_ALL_LAYERS = "all layers"


@dataclass(frozen=True, eq=False, kw_only=True)
class Exploration:
    """The page, ready to be written or shown; a notebook displays it."""

    data: Mapping[str, Any]
    """The data embedded in the page, as plain JSON."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Points and parts of the model that are not shown, and why, one line each."""
        return tuple(self.data["notes"])

    def html(self) -> str:
        """The page: one file that loads nothing from the network; the same bytes for the same input."""
        return document(dict(self.data))

    def write_html(self, path: str | Path) -> Path:
        """Write the page, whole or not at all, and return its path.

        Raises:
            InputError: If it cannot be written there.
        """
        return write_text(Path(path), self.html())

    def _repr_html_(self) -> str:
        return frame(
            self.html(), str(self.data["title"]), height=_FRAME_HEIGHT, sandbox="allow-scripts allow-downloads"
        )


def explore(
    points: Any,
    *,
    labels: Sequence[object] | None = None,
    groups: Any = None,
    spec: NormSpec | None = None,
    weight: Any = None,
    bias: Any = None,
    title: str = TITLE,
) -> Exploration:
    """An interactive page that shows what a norm does to some points.

    Of a row x with c = x - mean(x) (RMSNorm: c = x) it shows, one after the other, x, c, z = c / sqrt(mean(c^2) + eps),
    weight * z and y = weight * z + bias, in float64.

    Points of three or four features are shown in their own space, where they can be dragged. Points of any other
    number of features are shown in the basis of all-ones and the two principal directions of the points centred and
    scaled to one length, and normalized with all their features. A page has at most 2,000 points; more are thinned
    evenly, and its notes say so.

    Args:
        points: Shape (N, n): a tensor, an array or lists of numbers. Or what
            `normkit.explorer.activations.activations` gathered from a model.
        labels: A text for each point.
        groups: For each point the number of its group, from 0: its colour and marker, of which there are eight.
        spec: The norm; `specs.TORCH_LAYER_NORM` by default.
        weight: Its gain, as it is stored: n numbers, or one for all.
        bias: Its bias, likewise.
        title: Of the page.

    Returns:
        An `Exploration`: `write_html`, `html`, `notes`, and the page itself in notebooks.

    Raises:
        ShapeError: If the points are not of shape (N, n), or labels, groups, weight or bias do not fit them.
        KindError: If something is no number that must be one.
        DtypeError: If the points are complex or of truth values.
        SpecError: If the page cannot draw the norm, or the norm has no gain or bias where one is given.
        InputError: If there is no finite point.

    Example:
        >>> page = explore([[1.0, 2.0, 4.0], [0.5, -1.0, 2.0]], labels=["a", "b"])
        >>> page.data["given"]["labels"]
        ['a', 'b']
    """
    if isinstance(points, Activations):
        if any(argument is not None for argument in (labels, groups, spec, weight, bias)):
            raise InputError(
                "activations bring their tokens and norms along; leave out labels, groups, spec and weights"
            )
        return explore_models([points], title=title)
    shown = checked(points, labels, groups)
    n = shown.rows.shape[1]
    norm = _norm(spec, weight, bias, n, shown.dtype)
    if n in _SCENES:
        return _in_space(shown, norm, title, as_given=all(part is None for part in (spec, weight, bias)))
    return _in_projection(shown, norm, title)


def explore_models(models: Sequence[Activations], *, title: str = TITLE, start_there: bool = True) -> Exploration:
    """The page with the activations of some models: each norm by itself and, if they fit, all layers in one basis.

    Args:
        models: Their activations.
        title: Of the page.
        start_there: Open the page on the first of them, not on points of three features.
    """
    sets = [(model, _all_layers(model)) for model in models]
    share = max(BUDGET // max(sum(len(model.sites) + (whole is not None) for model, whole in sets), 1), 1)
    notes = [note for model in models for note in model.notes]
    shown = []
    for model, whole in sets:
        sites = [_thinned(site, share) for site in model.sites]
        records = [
            site_record(
                path=site.path,
                formula=site.formula,
                convention=site.convention,
                layer=site.layer,
                rows=site.rows,
                tokens=site.tokens,
                basis=principal_basis(site.rows),
                gain=site.gain,
                bias=site.bias,
            )
            for site in sites
        ]
        most = max(len(site.tokens) for site in sites)
        if most < model.counted:
            notes.append(f"{model.name}: each norm shows {most:,} of {model.counted:,} tokens, evenly spread.")
        if whole is not None:
            records.append(_record_of_all(whole, share))
        shown.append(_with_distinct_tokens(model.name, model.tokens, records))
    middle = len(models[0].sites) // 2 if models else 0
    start: dict[str, Any] = {}
    if start_there and models:
        start = {
            "scene": "model",
            "stage": 2,
            "model": 0,
            "site": middle,
            **models[0].sites[middle].convention.to_json(),
        }
    return Exploration(data=_data(title, notes, start, models=shown))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Norm:
    """A norm with its effective gain and its bias; None if it has none."""

    spec: NormSpec
    convention: Convention
    gain: Tensor | None
    bias: Tensor | None


def _norm(spec: NormSpec | None, weight: Any, bias: Any, n: int, dtype: torch.dtype) -> _Norm:
    spec = specs.TORCH_LAYER_NORM if spec is None else spec
    if not isinstance(spec, NormSpec):
        raise KindError(f"spec must be a NormSpec, got {type(spec).__name__}; identify finds that of a module")
    try:
        convention = convention_of(spec, n, dtype)
    except SpecError as reason:
        raise SpecError(f"the page cannot draw {spec}: {reason}") from None
    for name, given, there in (("weight", weight, spec.has_weight), ("bias", bias, spec.has_bias)):
        if given is not None and not there:
            raise SpecError(f"{name} was given, and the spec has none: {spec}; leave it out, or change the spec")
    gain = None if weight is None else spec.gain.effective(vector("weight", weight, n), torch.float64)
    return _Norm(spec=spec, convention=convention, gain=gain, bias=None if bias is None else vector("bias", bias, n))


def _in_space(shown: Points, norm: _Norm, title: str, *, as_given: bool) -> Exploration:
    """Points of three or four features, in their own space."""
    n = shown.rows.shape[1]
    start: dict[str, Any] = {"scene": _SCENES[n], "cloud": "given", **norm.convention.to_json()}
    for name, values, neutral in (("gain", norm.gain, 1.0), ("bias", norm.bias, 0.0)):
        if values is not None and float(values.abs().max()) > _LARGEST_SLIDER:
            raise InputError(f"the sliders of the page go from -100 to 100, and {name} reaches {values.abs().max():g}")
        # If the user gives no norm, the sliders keep the positions at which they show the most.
        if not as_given:
            start[name] = [neutral] * n if values is None else values.tolist()
    given = {
        "points": shown.rows.tolist(),
        "groups": list(shown.groups or [0] * len(shown.rows)),
        "labels": list(shown.labels),
        "n": n,
    }
    return Exploration(data=_data(title, shown.notes, start, given=given))


def _in_projection(shown: Points, norm: _Norm, title: str) -> Exploration:
    """Points of any number of features, as the one site of a model of their own."""
    record = site_record(
        path="points",
        formula=str(norm.spec),
        convention=norm.convention,
        layer=0,
        rows=shown.rows,
        tokens=range(len(shown.rows)),
        basis=principal_basis(shown.rows),
        gain=norm.gain,
        bias=norm.bias,
    )
    if shown.groups is not None:
        record["groups"] = list(shown.groups)
    start = {"scene": "model", "stage": 2, "model": 0, "site": 0, **norm.convention.to_json()}
    model = _with_distinct_tokens(label_text(title), shown.labels, [record])
    return Exploration(data=_data(title, shown.notes, start, models=[model]))


def _data(
    title: str,
    notes: Sequence[str],
    start: Mapping[str, Any],
    *,
    given: Mapping[str, Any] | None = None,
    models: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    data = {
        "schema": 1,
        "title": label_text(title),
        "notes": list(notes),
        "start": dict(start),
        "clouds": clouds(),
        "models": list(models),
    }
    return data if given is None else {**data, "given": dict(given)}


def _thinned(site: SiteActivations, most: int) -> SiteActivations:
    kept = evenly(len(site.rows), most)
    return replace(site, rows=site.rows[kept], tokens=tuple(site.tokens[index] for index in kept.tolist()))


def _all_layers(model: Activations) -> tuple[SiteActivations, ...] | None:
    """The first norm of each layer; None if there are fewer than two or they differ in kind."""
    leading = tuple(site for site in model.sites if site.leads)
    if len(leading) < 2 or len({site.convention for site in leading}) > 1:
        return None
    return leading


def _record_of_all(leading: Sequence[SiteActivations], most: int) -> dict[str, Any]:
    """The rows that enter the first norm of each block, in one basis; without gain and bias, which differ."""
    sites = [_thinned(site, max(most // len(leading), 1)) for site in leading]
    rows = torch.cat([site.rows for site in sites])
    record = site_record(
        path=_ALL_LAYERS,
        formula="what enters the first norm of each block, and the last norm",
        convention=sites[0].convention,
        layer=-1,
        rows=rows,
        tokens=[token for site in sites for token in site.tokens],
        basis=principal_basis(rows),
    )
    return {**record, "layers": [site.layer for site in sites for _ in site.tokens]}


def _with_distinct_tokens(name: str, tokens: Sequence[str], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A model with each of its tokens once, in the order of their first use."""
    number: dict[str, int] = {}
    sites = [
        {**record, "token": [number.setdefault(tokens[index], len(number)) for index in record["token"]]}
        for record in records
    ]
    return {"name": name, "tokens": list(number), "sites": sites}
