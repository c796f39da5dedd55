"""Measurements of the first text alone: one token on its way through a norm, and the keys a query could select."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from normkit import reference
from normkit.errors import InputError
from normkit.geometry.decomposition import Step, decompose, pulled_back
from normkit.geometry.rows import sphere_radius
from normkit.geometry.selection import selectable
from normkit.identification.sites import NormSite
from normkit.identification.tracing import Trace
from normkit.measurement.attention import queries_and_keys
from normkit.measurement.hooks import Listener, observed
from normkit.measurement.layout import BlockCall, block_of
from normkit.measurement.running import Batch, first_of, token_ids, token_mask
from normkit.measurement.sampling import evenly
from normkit.spec import NormSpec
from normkit.text import percent

_VALUES = 8
# A shortfall of the norm below this no float32 tensor can hold: not worth a word.
_NOTHING = 2.0**-24
_KEYS = 256
_SAMPLED = 16
# A linear program takes 0.6 microseconds for each key and feature: with 16 keys a head, these are some ten seconds if
# every key of every head needs one. Most do not.
_WORK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class WalkStep:
    """One stage of one vector on its way through a norm."""

    name: str
    """"raw", "centred", "scaled" or "gain and bias"."""
    does: str
    """The stage in a few words."""
    mean: float
    """Mean of the entries."""
    norm: float
    """Euclidean norm."""
    norm_over_sqrt_n: float
    """The Euclidean norm over sqrt(n): 1 on the sphere."""
    angle_to_ones: float
    """Angle to the all-ones direction, in degrees."""
    holds: str
    """The property that the vector now has, in a few words."""
    values: tuple[float, ...]
    """The first eight entries."""


@dataclass(frozen=True, kw_only=True)
class Walk:
    """One real token's vector, taken through the three maps at one site."""

    path: str
    """The site."""
    spec: NormSpec
    token: str
    """The token as text."""
    position: int
    """Its position in the first text."""
    features: int
    steps: tuple[WalkStep, ...]
    """raw, centred (where the norm centres), scaled, gain and bias (where it has any)."""
    ellipsoid_depth: float | None
    """1 - |(y - b) / g| over the sphere's radius: 0 on the ellipsoid's surface, above 0 inside, because of eps. Where a
    gain is 0 the scaled vector's entry stands in. None where there is no ellipsoid, as the norm centres only above the
    fraction bar or only below it."""
    plane_defect: float | None
    """|sum((y - b) / g)| / n: 0 in the ellipsoid's hyperplane; None where the norm does not centre."""
    module_error: float
    """Largest difference between the last step and what the module itself returned."""
    relative_error: float = math.nan
    """`module_error` over the largest magnitude of the last step; NaN if that is 0."""
    rounding: float = math.nan
    """The relative change by one rounding in the coarsest type of the call: half the machine
    epsilon. A norm in 16 bits rounds two or three times on its way."""


@dataclass(frozen=True, kw_only=True)
class KeySelection:
    """The keys of one attention call that some query could prefer to all others, for sampled keys of one text.

    A key is selectable if it is an exposed point of the convex hull of all keys of the text, whatever a causal mask
    would hide; one that recurs is counted once. Normalized rows always are selectable (at eps = 0); a projection to a
    head's few features can hide them.
    """

    path: str
    """Path of the module that made the call."""
    block: int | None
    """Index of its block, or None."""
    keys: int
    """Keys of the text, T, padding left out; of a long text the first 256."""
    sampled: int
    """Keys tried a head, spread evenly."""
    before: float | None
    """Share of the sampled rows that are selectable as they enter the module that made the call; None if they were not
    seen there."""
    key_heads: int
    """Key heads of the call."""
    heads: tuple[tuple[int, float], ...]
    """Pairs (key head, share of the sampled keys that are selectable); all heads, or some spread evenly where all of a
    large model's would take long."""

    @property
    def after(self) -> float:
        """Mean share over the heads tried; NaN where none was."""
        return sum(share for _, share in self.heads) / len(self.heads) if self.heads else math.nan


def walk(site: NormSite, x: Tensor, y: Tensor, *, token: str, position: int) -> Walk:
    """Take one vector through a norm step by step, in float64.

    raw x -> centred x - mean(x) (where the norm centres) -> scaled by 1 / s, or sqrt(n) / s -> times the gain, plus the
    bias (where it has any). A gain that the spec puts before normalizing is applied first.

    Args:
        site: The norm; its spec and its effective gain and bias are used, not the module.
        x: Input for one token, of shape (n,).
        y: Output of the norm for that token, of shape (n,).
        token: The token as text.
        position: Its position in the text.
    """
    spec, n = site.spec, x.numel()

    def of_one_row(parameter: Tensor | None) -> Tensor | None:
        """The entries that act on the row: those of the first head where each head has its own."""
        if parameter is None:
            return None
        entries = parameter.detach().to("cpu", torch.float64)
        return entries[0] if entries.dim() == 2 else entries.reshape(-1).expand(n)

    gain, bias = of_one_row(site.gain), of_one_row(site.bias)
    # The gain has its offset already, and eps=None means the machine epsilon of x, not that of the row in float64.
    taken = decompose(x.detach().to("cpu", torch.float64), reference.unrounded(spec, x), gain, bias)
    if spec.gain.is_before:
        gain = None
    has_sphere = not spec.centring.is_half
    radius = sphere_radius(spec, n) if has_sphere else math.nan
    scaled = next(step for step in taken.steps if step.name == "scaled")
    inside = 1.0 - float(scaled.norm) / radius
    error = float((y.detach().to("cpu", torch.float64) - taken.output).abs().max())
    largest = float(taken.output.abs().max())
    pulled = pulled_back(taken.output, scaled.value, gain, bias)
    return Walk(
        path=site.path,
        spec=spec,
        token=token,
        position=position,
        features=n,
        steps=tuple(_in_words(step, order, spec, gain, bias, inside) for order, step in enumerate(taken.steps)),
        ellipsoid_depth=1.0 - float(pulled.norm()) / radius if has_sphere else None,
        plane_defect=abs(float(pulled.sum())) / n if spec.centring.numerator else None,
        module_error=error,
        relative_error=error / largest if largest else math.nan,
        rounding=max(torch.finfo(x.dtype).eps, torch.finfo(y.dtype).eps) / 2,
    )


def _in_words(
    step: Step, order: int, spec: NormSpec, gain: Tensor | None, bias: Tensor | None, inside: float
) -> WalkStep:
    """One step with what it does and what then holds; `gain` is the one after normalizing."""
    kept_inside = f", eps keeps it {100 * inside:.2g} % inside" if inside > _NOTHING else ""
    match step.name:
        case "raw":
            share = float(step.energy_along_ones) if step.norm > 0 else 0.0
            does = "the vector as it enters"
            holds = f"{percent(share)} of its energy lies along the all-ones direction"
        case "centred":
            does, holds = "minus its mean", "mean 0: in the hyperplane orthogonal to 1"
        case "scaled":
            does = f"divided by its {spec.divisor.root_in_words(is_centred=spec.centring.statistics)}"
            does += ", times sqrt(n)" if spec.divisor.is_multiplied else ""
            holds = f"on the sphere of radius {spec.divisor.radius_in_words}{kept_inside}"
            if spec.centring.is_half:
                holds = "on no sphere, as the mean counts above the fraction bar or below it, not both"
        case "gain and bias" if order == 1:
            does, holds = "times the gain, before normalizing", "stretched along each axis"
        case "gain and bias":
            does = ", ".join(["times the gain"] * (gain is not None) + ["plus the bias"] * (bias is not None))
            shape = "sphere" if gain is None else "ellipsoid"
            centre = "centre 0" if bias is None else "centre b"
            normal = "" if not spec.centring.numerator else " and normal 1" if gain is None else " and normal 1/g"
            holds = f"on the {shape} with {centre}{normal}{kept_inside}"
            if spec.centring.is_half:
                holds = "on no ellipsoid, as it was on no sphere"
    return WalkStep(
        name=step.name,
        does=does,
        mean=float(step.mean),
        norm=float(step.norm),
        norm_over_sqrt_n=float(step.norm) / math.sqrt(step.value.numel()),
        angle_to_ones=math.degrees(step.angle_to_ones),
        holds=holds,
        values=tuple(step.value[:_VALUES].tolist()),
    )


class TokenRow(Listener):
    """Keeps what enters and leaves a norm for the last token of a batch's first text, at the norm's first call."""

    def __init__(self, site: NormSite, batch: Batch) -> None:
        self._site, self._ids = site, token_ids(batch)
        shape, mask = first_of(batch).shape, token_mask(batch)
        # A batch without tokens has no row of one.
        self._batch = (shape[0], shape[1]) if len(shape) > 1 else (0, 0)
        is_padded = mask is not None and bool(mask[0].any())
        self.position = int(mask[0].nonzero()[-1]) if is_padded and mask is not None else self._batch[1] - 1
        """Position of the token in the text."""
        self._entered: tuple[torch.Size, Tensor | None] | None = None
        self._left: tuple[torch.Size, Tensor | None] | None = None

    @contextmanager
    def listening(self, model: nn.Module) -> Iterator[None]:
        """Listen to the norm while the model runs inside; the model is left as it was, also after an exception."""
        around = f"{self._site.parent}." if self._site.parent else ""
        inside = [path for path, _ in model.named_modules() if f"{path}.".startswith(around)]
        with observed(model, [self._site], [], inside if self._site.function is not None else [], self):
            yield

    def before_site(self, _site: NormSite, x: Tensor) -> None:
        """Keep the token's row of the input, which the norm may overwrite."""
        if self._entered is None:
            self._entered = x.shape, self._row(x)

    def after_site(self, _site: NormSite, y: Tensor, _given: object) -> None:
        """Keep the token's row of the output."""
        if self._left is None:
            self._left = y.shape, self._row(y)

    def rows(self) -> tuple[Tensor, Tensor] | None:
        """x and y of shape (n,), those of the first head where a token has several rows.

        None where the norm was not called, or its rows are not those of single tokens.
        """
        if self._entered is None or self._left is None or self._entered[0] != self._left[0]:
            return None
        x, y = self._entered[1], self._left[1]
        return None if x is None or y is None else (x, y)

    def walk(self, decode: Callable[[int], str] | None) -> Walk | None:
        """The token on its way through the norm; `decode` turns its id into text."""
        if (rows := self.rows()) is None:
            return None
        text = decode(int(self._ids[0, self.position])) if decode is not None and self._ids is not None else ""
        return walk(self._site, *rows, token=text, position=self.position)

    def _row(self, x: Tensor) -> Tensor | None:
        """The row of the token: the token axis is the one that is as long as the text, behind that of the texts."""
        texts, tokens = self._batch
        leading = x.shape[:-1]
        if not self._site.spec.rows.are_last or not tokens:
            return None
        if leading == (texts * tokens,):
            return x.detach()[self.position].clone()
        axes = [axis for axis, length in enumerate(leading) if length == tokens]
        # With as many texts as tokens, the first axis is that of the texts.
        if len(axes) > 1 and axes[0] == 0 and leading[0] == texts:
            axes = axes[1:]
        if not axes:
            return None
        return x.detach()[tuple(self.position if axis == axes[0] else 0 for axis in range(len(leading)))].clone()


@contextmanager
def key_selections(
    model: nn.Module, trace: Trace, blocks: Sequence[BlockCall], batch: Batch, progress: Callable[[int, int], None]
) -> Iterator[list[KeySelection]]:
    """Judge 16 keys a head of each scaled_dot_product_attention call of the forward pass inside, as it is made.

    How many heads are tried is a constant over keys times features, spread evenly over the calls. Causal masks count
    for nothing: a key is judged among all keys of the text. The first text of the batch that has a token is judged.
    `progress` is called with the calls judged and the calls in all.

    Yields:
        A list that is filled with one entry for each call of which a head was tried; it stays empty where SciPy is not
        installed.
    """
    calls = [call.parent for call in trace.functions if call.function == "sdpa"]
    if not calls or find_spec("scipy") is None:
        yield []
        return
    judge = _Judge(len(calls), blocks, batch, progress)
    with observed(model, [], [], calls, judge):
        yield judge.judged


class _Judge(Listener):
    """Judges the keys of every call as it is made, so that none are kept."""

    def __init__(
        self, calls: int, blocks: Sequence[BlockCall], batch: Batch, progress: Callable[[int, int], None]
    ) -> None:
        self.judged: list[KeySelection] = []
        self._calls, self._blocks, self._progress = calls, blocks, progress
        first, mask = first_of(batch), token_mask(batch)
        self._batch = len(first) if first.dim() else 1
        self._text = 0 if mask is None else int(mask.any(-1).byte().argmax())
        own = None if mask is None or bool(mask[self._text].all()) else mask[self._text]
        self._valid = None if own is None else own.cpu().nonzero().flatten()
        self._tokens = None if own is None else len(own)
        self._entered: tuple[str, Tensor | None] = ("", None)
        self._heard = 0

    def before_parent(self, path: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        # Where there are several, as in cross-attention, the keys may be read from another than the first.
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        rows = [x for x in given if x.is_floating_point() and x.dim() == 3]
        self._entered = (path, self._of_text(rows[0][:, None]) if len(rows) == 1 else None)

    def at_attention(self, parent: str, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if function != "sdpa":
            return
        self._progress(self._heard, self._calls)
        place, self._heard = self._heard, self._heard + 1
        call = queries_and_keys(args, kwargs)
        keys = None if call is None else self._of_text(call.key)
        if keys is None:
            return
        count, features = keys.shape[1:]
        # Heads to try of this call, so that those of all calls are `_WORK` at most.
        heads = max(1, _WORK // (count * features))
        quota = (place + 1) * heads // self._calls - place * heads // self._calls
        shares = [(head, _share(keys[head])) for head in evenly(len(keys), quota).tolist()]
        if not shares:
            return
        path, rows = self._entered
        fits = path == parent and rows is not None and rows.shape[1] == count
        self.judged.append(
            KeySelection(
                path=parent,
                block=block_of(parent, self._blocks),
                keys=count,
                sampled=min(_SAMPLED, count),
                before=_share(rows[0]) if fits and rows is not None else None,
                key_heads=len(keys),
                heads=tuple((head, share) for head, share in shares if share is not None),
            )
        )

    def _of_text(self, x: Tensor) -> Tensor | None:
        """The text's keys of (B, H, S, d), at most 256: (H, T, d) in float64 on the CPU; None if the mask misfits."""
        if x.shape[0] != self._batch or (self._tokens is not None and x.shape[2] != self._tokens):
            return None
        valid = torch.arange(x.shape[2]) if self._valid is None else self._valid
        return x[self._text][:, valid[:_KEYS].to(x.device)].detach().cpu().double() if len(valid) else None


def _share(keys: Tensor) -> float | None:
    """Share of sampled keys (T, d) that are selectable; None if one is not finite or not to be judged."""
    # A key that recurs is the same answer to a query wherever it stands.
    distinct, places = torch.unique(keys, dim=0, return_inverse=True)
    if distinct.shape[1] > len(distinct):
        # Coordinates in the span of the keys are fewer than features, and all products stay as they are.
        distinct = torch.linalg.qr(distinct.T, mode="r").R.T
    try:
        found = selectable(distinct, places[evenly(len(keys), _SAMPLED)])
    except InputError:
        return None
    return float(found.double().mean())
