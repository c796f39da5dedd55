"""From measured facts to an inspection: the rules judge them; and the declaration that an inspected model fits."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from torch import nn

from normkit import rules
from normkit.inspection.result import Inspection
from normkit.measurement.baseline import Baseline, DeclaredNorm, Values
from normkit.measurement.facts import Attention, Block, ModelFacts, Placement, Site
from normkit.measurement.intent import Intent
from normkit.measurement.quantities import Foldedness, KeySelection, Walk
from normkit.measurement.structure import Structure
from normkit.measurement.weights import recurring_outliers, ungathered
from normkit.text import dtype_name


def judged(
    facts: rules.Facts,
    *,
    walk: Walk | None = None,
    selections: tuple[KeySelection, ...] = (),
    foldedness: Foldedness | None = None,
    foldedness_unknown: str = "",
) -> Inspection:
    """The inspection of a model of which these facts were measured; the other arguments are fields of `Inspection`."""
    findings, checks = rules.check(facts)
    return Inspection(
        model=facts.model,
        sites=facts.sites,
        blocks=facts.blocks,
        attentions=facts.attentions,
        final_norm=facts.final_norm,
        recurring_outliers=recurring_outliers({site.path: site.gain for site in facts.sites if site.gain is not None}),
        walk=walk,
        findings=findings,
        checks=checks,
        unrecognised=(
            *((other.path, other.reason) for other in facts.others),
            *((norm.path, norm.reason) for norm in facts.handwritten),
        ),
        selections=selections,
        training=facts.training,
        foldedness=foldedness,
        foldedness_unknown=foldedness_unknown,
    )


def facts_of(
    model: nn.Module,
    structure: Structure | None,
    sites: tuple[Site, ...],
    blocks: tuple[Block, ...],
    attentions: tuple[Attention, ...],
    *,
    name: str,
    source: str,
    tokens: int,
    padding: int = 0,
    loss: float = math.nan,
    distinct: int | None = None,
    **known: Any,
) -> rules.Facts:
    """The facts of a model, of a text or of a run, for the rules.

    Args:
        model: The model.
        structure: Its structure, or None if it could not be found.
        sites: Its norms as they were measured; likewise `blocks` and `attentions`.
        blocks: Its blocks.
        attentions: Its attention calls.
        name: As in `ModelFacts`; likewise the other keywords that it has.
        source: The input in words.
        tokens: Tokens that were counted.
        padding: Tokens that were left out.
        loss: The loss of the text.
        distinct: Distinct token ids.
        known: Other fields of `rules.Facts`.
    """
    dtypes = Counter(dtype_name(parameter.dtype) for parameter in model.parameters())
    if structure is not None:
        known |= {
            "final_norm": structure.final_norm,
            "passports": {site.path: site.passport for site in structure.sites},
            "others": structure.others,
            "ungathered": ungathered(model, structure.others),
            "handwritten": structure.handwritten,
            "called": frozenset(call.path for call in structure.called.modules),
            "unread": structure.unread,
            "constant": structure.constant,
            "input_hooks": structure.input_hooks,
        }
    return rules.Facts(
        model=ModelFacts(
            name=name or type(model).__name__,
            class_name=type(model).__name__,
            architecture=str(getattr(getattr(model, "config", None), "model_type", "")),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            dtype=dtypes.most_common(1)[0][0] if dtypes else "none",
            width=blocks[0].stream_in.features if blocks else max((site.input.features for site in sites), default=0),
            source=source,
            tokens=tokens,
            padding=padding,
            loss=loss,
            distinct=distinct,
        ),
        sites=sites,
        blocks=blocks,
        attentions=attentions,
        **{"final_norm": None, **known},
    )


def infer(inspection: Inspection, intent: Intent | None = None, *, source: str = "") -> Baseline:
    """The declaration that an inspected model fits: every norm is meant to do what it was seen to do.

    Where the stock class of its config computes something else, that is what is meant; so is a residual taken before
    the norm, unless the stock class takes it after.

    Args:
        inspection: The inspection of the model.
        intent: The formulas of its stock class, or None.
        source: The name of the file it goes to.
    """
    return Baseline(
        source=source,
        norms={site.path: _declared(site, intent) for site in inspection.sites},
        placements={block.path: _placement(block, intent) for block in inspection.blocks},
        final_norm=inspection.final_norm,
        others=tuple(path for path, _ in inspection.unrecognised),
    )


def _declared(site: Site, intent: Intent | None) -> DeclaredNorm:
    spec, features, factor = site.spec, site.input.features, site.factor
    if intent is not None and (meant := intent.specs.get(site.path)) is not None:
        # The stock norm was identified on one row: only the model in action shows along which axes it works.
        spec = meant.replace(**spec.rows.conventions()) if site.path in intent.stock else meant
        features = intent.features.get(site.path, features)
        factor = factor if site.path in intent.stock else 1.0
    return DeclaredNorm(
        spec=spec,
        role=site.role,
        features=features,
        calls=site.forward_calls,
        dtype=site.dtype,
        output_dtype=site.output_dtype,
        factor=factor,
        gain=Values.of(site.gain),
        bias=Values.of(site.bias),
    )


def _placement(block: Block, intent: Intent | None) -> Placement:
    by_design = intent is not None and block.path in intent.stock
    return "pre" if block.placement == "residual-after-norm" and not by_design else block.placement
