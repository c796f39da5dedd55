"""What is known of a watched model before its first step: its structure, what it is meant to be, what it ignores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from normkit.identification.sharding import is_elsewhere
from normkit.inspection.baseline import Baseline, check_fits
from normkit.inspection.gain_gradients import gain_gradient_errors
from normkit.inspection.intent import Intent, stock_intent
from normkit.inspection.running import vocabulary
from normkit.inspection.sharing import Sharing, find_shared
from normkit.inspection.structure import Structure


@dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """A watched model.

    Attributes:
        model: The model, without wrappers.
        structure: What it is made of; None if that could not be found.
        vocabulary: Tokens that it embeds, or 0.
        baseline: What it is meant to be, or None.
        intent: What the stock class of its config computes, or None.
        shared: Norms that serve several places, by path.
        gradient_errors: Of the gradient of each norm's gain in 16 bits, by path.
    """

    model: nn.Module
    structure: Structure | None
    vocabulary: int = 0
    baseline: Baseline | None = None
    intent: Intent | None = None
    shared: Mapping[str, Sharing] = field(default_factory=dict)
    gradient_errors: Mapping[str, float] = field(default_factory=dict)


def introduced(model: nn.Module, structure: Structure, baseline: Baseline | None) -> Subject:
    """A surveyed model with all that can be known of it beforehand.

    Raises:
        InputError: If the baseline is that of another model.
    """
    check_fits(baseline, [site.path for site in structure.sites])
    return Subject(
        model=model,
        structure=structure,
        vocabulary=vocabulary(model) or 0,
        baseline=baseline,
        intent=stock_intent(model),
        shared=find_shared(model, structure),
        gradient_errors=_gradient_errors(structure),
    )


def _gradient_errors(structure: Structure) -> Mapping[str, float]:
    # What another process holds a part of cannot be tried alone.
    held = [
        site for site in structure.sites if site.module is None or not any(map(is_elsewhere, site.module.parameters()))
    ]
    return gain_gradient_errors(
        held, {site.path: str(structure.dtypes(site)[0]).removeprefix("torch.") for site in held}
    )
