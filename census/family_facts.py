"""The norms of one family and their places, found by behaviour on its tiny model."""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from configurations import Family, default_model, epsilons, tiny_batch, tiny_configuration, tiny_model
from normkit.conventions.eps import PLACEMENTS
from normkit.identification.sites import NormSite, find_sites
from normkit.identification.tracing import first_output, trace
from normkit.measurement import placement
from normkit.measurement.hooks import observed
from normkit.measurement.layout import find_blocks
from normkit.spec import NormSpec
from wiring import Wiring, is_parallel

Kind = Literal["decoder", "encoder", "encoder-decoder", "vision", "sound"]

# A causal model's first positions do not see the last token; sums in another order differ by this much at most.
_UNMOVED = 1e-5


@dataclass(frozen=True, kw_only=True)
class NormKind:
    """One kind of norm of a family."""

    name: str
    """The formula in words: "LayerNorm", "RMSNorm (1 + w)"."""
    eps: float | None
    """As the stock configuration class sets it; None for the machine epsilon."""
    rounding: str
    """When 16-bit rows are rounded: "early", "late", "weight" or "none", as `NormSpec.cast`."""
    count: int
    """How many sites of the tiny model are of this kind."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The row of one family."""

    family: Family
    kind: Kind
    """Told from its input and from whether a token sees those after it."""
    year: int | None
    """Latest year of the copyright notice in its modelling file; None without one."""
    norms: tuple[NormKind, ...]
    """Its kinds of norms, in forward order of their first site."""
    others: dict[str, int]
    """Norms that are no plain norm of a row: "batch norm", "gated norm", "other", with counts."""
    placements: dict[str, int]
    """The placements of its blocks, with counts; "parallel" where attention and MLP read the stream side by side."""
    final_norm: str | None
    """Path of the norm after the last block, or None."""
    query_key: tuple[str, ...]
    """How queries and keys are normalized: "per head", "all heads", "latent"; empty if they are not."""
    per_layer: tuple[int, int] | None
    """Fewest and most norms in a block; None without blocks."""
    configured: dict[str, float]
    """The fields of the stock configuration that say eps, with their values."""
    share: float | None
    """The norms' share of the parameters in the family's default size; None if it is not built."""

    @property
    def formulas(self) -> frozenset[str]:
        """Among "LayerNorm", "RMSNorm" and whatever else there is."""
        return frozenset(re.split(r" \(| over ", norm.name)[0] for norm in self.norms)

    @property
    def unconfigured(self) -> tuple[float, ...]:
        """Values that act as eps though no field has them, where there are such fields."""
        acting = dict.fromkeys(norm.eps for norm in self.norms if norm.eps is not None)
        return tuple(eps for eps in acting if self.configured and eps not in self.configured.values())

    @property
    def placement(self) -> str:
        """The one placement of all blocks, "mixed", or "no blocks"."""
        match tuple(self.placements):
            case ():
                return "no blocks"
            case (one,):
                return one
            case _:
                return "mixed"


def measure(family: Family) -> Facts:
    """Build the tiny model, find its norms and replay its blocks."""
    model = tiny_model(family)
    batch = tiny_batch(family, model)

    def run() -> object:
        return model(**batch)

    called = trace(model, run)
    sites, unrecognised = find_sites(model, called)
    blocks = find_blocks(model, called)
    sweeps, roles, final_norm = placement.sweep(model, sites, blocks, run)
    wiring = Wiring()
    with torch.no_grad(), observed(model, sites, blocks, [path for path, _ in model.named_modules()], wiring):
        run()
    inside = [[site for site in sites if f"{site.parent}.".startswith(f"{block.path}.")] for block in blocks]
    placements = Counter(
        "parallel"
        if swept.placement == "pre"
        and is_parallel(block, {site.path for site in norms if roles[site.path] == "pre"}, wiring.bare, called)
        else swept.placement
        for block, norms, swept in zip(blocks, inside, sweeps, strict=True)
    )
    return Facts(
        family=family,
        kind=_kind(model, batch),
        year=_year(type(model)),
        norms=_norm_kinds(sites),
        others=dict(Counter(_other(other.reason) for other in unrecognised)),
        placements=dict(placements),
        final_norm=final_norm,
        query_key=tuple(wiring.query_key),
        per_layer=(min(map(len, inside)), max(map(len, inside))) if blocks else None,
        configured={name: eps for name, eps in epsilons(tiny_configuration(family)).items() if isinstance(eps, float)},
        share=_share(family, sites),
    )


def name_of(spec: NormSpec) -> str:
    """A spec's formula in words."""
    name = "half-centred norm" if spec.centring.is_half else "LayerNorm" if spec.centring.numerator else "RMSNorm"
    if spec.rows.are_samples:
        name = "GroupNorm"
    elif spec.divisor.is_sum:
        name = "L2 norm"
    notes = []
    if spec.gain.offset:
        notes.append(f"{spec.gain.offset:g} + w")
    if not spec.has_weight:
        notes.append("no gain or bias" if name == "LayerNorm" and not spec.has_bias else "no gain")
    elif not spec.has_bias and name == "LayerNorm":
        notes.append("no bias")
    if spec.has_bias and name == "RMSNorm":
        notes.append("with bias")
    if spec.placement is not PLACEMENTS["inside"]:
        notes.append(f"eps {spec.placement.words}")
    notes += spec.divisor.labels
    return f"{name}{' over channels' if spec.rows.are_places else ''}" + (f" ({', '.join(notes)})" if notes else "")


def _norm_kinds(sites: tuple[NormSite, ...]) -> tuple[NormKind, ...]:
    counted = Counter((name_of(site.spec), site.spec.eps, site.spec.cast) for site in sites)
    return tuple(
        NormKind(name=name, eps=eps, rounding=rounding, count=count) for (name, eps, rounding), count in counted.items()
    )


def _other(reason: str) -> str:
    return next((kind for kind in ("batch norm", "gated norm", "gated or adaptive norm") if kind in reason), "other")


def _kind(model: Any, batch: dict[str, Any]) -> Kind:
    if "decoder_input_ids" in batch:
        return "encoder-decoder"
    if "input_ids" not in batch:
        return "vision" if model.main_input_name == "pixel_values" else "sound"
    ids = batch["input_ids"]
    changed = ids.clone()
    changed[:, -1] = ids[:, -1] % 50 + 5
    with torch.no_grad():
        one, other = (first_output(tuple(model(**{**batch, "input_ids": each}).values())) for each in (ids, changed))
    if one is None or other is None or one.dim() != 3 or one.shape[1] != ids.shape[1]:
        return "encoder"
    moved = (one - other)[:, :-1].abs().max() / one.abs().max()
    return "decoder" if moved <= _UNMOVED else "encoder"


def _year(model_class: type[nn.Module]) -> int | None:
    """Latest year of the notices at the head of the file that defines a class."""
    text = Path(inspect.getfile(sys.modules[model_class.__module__])).read_text(encoding="utf-8")[:6000]
    years = re.findall(r"Copyright\D{0,12}(\d{4})", text)
    return max(map(int, years), default=None)


def _share(family: Family, sites: tuple[NormSite, ...]) -> float | None:
    """Parameters of the modules at the sites' paths, any index for any other, in the family's default size."""
    norms = {(_any_index(site.path), type(site.module)) for site in sites if site.module is not None}
    try:
        model = default_model(family)
    # Any third-party constructor runs here; not every default configuration can be built.
    except Exception:
        return None
    inside = sum(
        parameter.numel()
        for path, module in model.named_modules()
        if (_any_index(path), type(module)) in norms
        for parameter in module.parameters()
    )
    return inside / sum(parameter.numel() for parameter in model.parameters())


def _any_index(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", path)
