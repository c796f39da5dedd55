"""What an inspection as a whole says: the declaration that its model fits."""

from __future__ import annotations

from normkit.inspection.result import Inspection
from normkit.measurement.baseline import Baseline, DeclaredNorm, Values
from normkit.measurement.facts import Block, Placement, Site
from normkit.measurement.intent import Intent


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
