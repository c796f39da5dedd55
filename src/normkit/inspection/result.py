"""The result of an inspection as frozen values with JSON out: the contract between measuring and drawing.

Nothing here computes more than a lookup. Tensors never enter: every number is a Python float or int,
non-finite ones included (they become strings in JSON, which has none).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from normkit import rules
from normkit.checkpoint.misfits import ATTRIBUTE
from normkit.files import finite, write_text
from normkit.identification import offloading
from normkit.inspection.first_text import KeySelection, Walk
from normkit.inspection.foldedness import Foldedness
from normkit.measurement.baseline import Baseline, DeclaredBatchNorm, DeclaredNorm, Values
from normkit.measurement.batch_norms import DataStatistics, batch_norms
from normkit.measurement.facts import Attention, BatchNorm, Block, ModelFacts, Placement, Site
from normkit.measurement.intent import Intent
from normkit.measurement.modes import ModeChange
from normkit.measurement.modulation import Modulation
from normkit.measurement.structure import Structure, Usage
from normkit.measurement.training import Training
from normkit.measurement.weights import recurring_outliers
from normkit.rules.finding import Check, Finding, Severity
from normkit.spec import NormSpec
from normkit.text import counted, dtype_name

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The result of `normkit.inspect`: every site, block and attention, and what the rules found."""

    model: ModelFacts
    """The inspected model."""
    sites: tuple[Site, ...]
    """The norms, in forward order."""
    blocks: tuple[Block, ...]
    """The repeated blocks, in forward order."""
    attentions: tuple[Attention, ...]
    """The attention calls, in forward order."""
    final_norm: str | None
    """Path of the norm between the last block and the readers of the stream, or None."""
    recurring_outliers: tuple[tuple[int, tuple[str, ...]], ...]
    """Pairs (feature index, paths) of gain outliers seen at the same index of several sites."""
    walk: Walk | None
    """One token's way through a norm, or None."""
    findings: tuple[Finding, ...]
    """Worst first."""
    checks: tuple[Check, ...]
    """One a rule, in the rules' order."""
    unrecognised: tuple[tuple[str, str], ...]
    """Modules that change scale like a norm and are none that a spec describes, with the reason; batch norms too."""
    batch_norms: tuple[BatchNorm, ...] = ()
    """The norms with running statistics, in forward order."""
    modes: ModeChange | None = None
    """The output with batch norms in training mode against evaluation mode; None where that was not tried."""
    modulations: tuple[Modulation, ...] = ()
    """Norms whose output is multiplied or shifted for each sample, as in a DiT; empty where none was seen."""
    selections: tuple[KeySelection, ...] = ()
    """Selectable keys of one text, one entry an attention call; empty if none was tried."""
    training: Training | None = None
    """Observations of a training run; None if the model was only run."""
    foldedness: Foldedness | None = None
    """Distance of the weights from folded and centred; None if it is not known."""
    foldedness_unknown: str = ""
    """Reason why `foldedness` is unknown, as an undeclared family; "" if it is known or was not asked for."""

    @property
    def worst(self) -> Severity | None:
        """The severity of the worst finding, or None."""
        return self.findings[0].severity if self.findings else None

    def to_json(self) -> dict[str, Any]:
        """Everything as plain dictionaries and lists, with `schema_version`; NaN and infinity as strings."""
        values = plain(self)
        assert isinstance(values, dict)
        return {"schema_version": SCHEMA_VERSION, **values}

    def shown_role(self, site: Site) -> str:
        """The role of a norm, or "in-branch" where only the placement of its block is known."""
        if site.role == "unknown" and site.block is not None and self.blocks[site.block].placement != "unknown":
            return "in-branch"
        return site.role

    def stack_of(self, block: int | None) -> str:
        """The path of the list that a block is a member of; "" for no block."""
        return "" if block is None else self.blocks[block].path.rpartition(".")[0]

    def stack_names(self) -> list[str]:
        """For each block the name of its stack: the words that tell it from the others. None for one stack alone."""
        paths = [self.stack_of(block.index).split(".") for block in self.blocks]
        if len({*map(tuple, paths)}) < 2:
            return []
        ends = min(map(len, paths))
        first = next((at for at in range(ends) if len({path[at] for path in paths}) > 1), ends)
        # A number says little without the word before it.
        first -= any(word.isdigit() for path in paths for word in path[first : first + 1])
        is_numbered = ["".join(path[first + 1 : first + 2]).isdigit() for path in paths]
        return [".".join(path[first : first + 1 + more] or path) for path, more in zip(paths, is_numbered, strict=True)]

    def block_name(self, block: int) -> str:
        """The number of a block, in its stack where there are several."""
        names = self.stack_names()
        return f"{names[:block].count(names[block])} of {names[block]}" if names else str(block)

    def __str__(self) -> str:
        """The verdict, the findings, the norms and the checks, as `normkit inspect` prints them."""
        from normkit.inspection.report import printing
        from normkit.show.terminal import printed

        return printed(printing.summary(self))

    def __repr__(self) -> str:
        counts = f"{counted(len(self.sites), 'norm')}, {counted(len(self.findings), 'finding')}"
        return f"<Inspection of {self.model.name}: {counts}>"

    def write_html(self, path: str | Path) -> Path:
        """Write the report as one self-contained HTML file, whole or not at all, and return its path.

        Raises:
            InputError: If it cannot be written there.
        """
        from normkit.inspection.report import description

        return write_text(Path(path), description.render(self))

    def _repr_html_(self) -> str:
        """The report in an isolated frame, for notebooks."""
        from normkit.inspection.report import description

        return description.frame(self)


def plain(value: object) -> object:
    """Dataclasses as dictionaries, tuples as lists, NaN and infinity as strings: what JSON can hold."""
    # Most values are numbers and words.
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (tuple, list)):
        return [plain(member) for member in value]
    if isinstance(value, NormSpec):
        return {"formula": str(value), **value.to_json()}
    if isinstance(value, Mapping):
        return {key: plain(member) for key, member in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def judged(facts: rules.Facts, **others: Any) -> Inspection:
    """The inspection of a model of which these facts were measured; the others are fields of `Inspection`."""
    findings, checks = rules.check(facts)
    others_found = [(each.path, each.reason) for each in facts.others]
    handwritten = [(each.path, each.reason) for each in facts.handwritten]
    return Inspection(
        model=facts.model,
        sites=facts.sites,
        blocks=facts.blocks,
        attentions=facts.attentions,
        final_norm=facts.final_norm,
        recurring_outliers=recurring_outliers({site.path: site.gain for site in facts.sites if site.gain is not None}),
        findings=findings,
        checks=checks,
        unrecognised=(*others_found, *handwritten),
        batch_norms=facts.batch_norms,
        modes=facts.modes,
        modulations=facts.modulations or (),
        training=facts.training,
        **{"walk": None, **others},
    )


def facts_of(
    model: nn.Module,
    structure: Structure | None,
    sites: tuple[Site, ...],
    blocks: tuple[Block, ...],
    attentions: tuple[Attention, ...],
    *,
    name: str,
    text: Mapping[str, Any],
    data: DataStatistics | None = None,
    **known: Any,
) -> rules.Facts:
    """The facts of a model, of a text or of a run, for the rules.

    Args:
        model: The model.
        structure: Its structure, or None if it could not be found.
        sites: Its norms as they were measured; likewise `blocks` and `attentions`.
        blocks: Its blocks.
        attentions: Its attention calls.
        name: Its name; its class by default.
        text: The fields of `ModelFacts` that tell of the input.
        data: What enters the norms with running statistics; None where that was not counted.
        known: Other fields of `rules.Facts`.
    """
    dtypes = Counter(dtype_name(parameter.dtype) for parameter in model.parameters())
    if structure is not None:
        known |= {
            "final_norm": structure.final_norm,
            "passports": {site.path: site.passport for site in structure.sites},
            "others": structure.others,
            "batch_norms": batch_norms(model, structure.others, data),
            "called": frozenset(call.path for call in structure.called.modules),
            **{each.name: getattr(structure, each.name) for each in dataclasses.fields(Usage)},
        }
    facts = ModelFacts(
        name=name or type(model).__name__,
        class_name=type(model).__name__,
        architecture=str(getattr(getattr(model, "config", None), "model_type", "")),
        parameters=sum(parameter.numel() for _, parameter, _ in offloading.parameters(model)),
        dtype=dtypes.most_common(1)[0][0] if dtypes else "none",
        width=blocks[-1].stream_out.features if blocks else max((site.input.features for site in sites), default=0),
        **text,
    )
    of_parts = {"sites": sites, "blocks": blocks, "attentions": attentions}
    unfit = getattr(model, ATTRIBUTE, None)
    return rules.Facts(model=facts, misfits=unfit, **{"final_norm": None, **of_parts, **known})


def infer(inspection: Inspection, intent: Intent | None = None, *, source: str = "") -> Baseline:
    """The declaration that an inspected model fits: every norm is meant to do what it was seen to do.

    Where the stock class of its config computes something else, that is what is meant; so is a residual taken before
    the norm, unless the stock class takes it after. `intent` has the formulas of its stock class, `source` is the name
    of the file that the declaration goes to.
    """
    stock: Collection[str] = () if intent is None else intent.stock
    norms = {}
    for site in inspection.sites:
        spec, features, factor = site.spec, site.input.features, site.factor
        if intent is not None and (meant := intent.specs.get(site.path)) is not None:
            # The stock norm was identified on one row: only the model in action shows along which axes it works.
            spec = meant.replace(**spec.rows.conventions()) if site.path in stock else meant
            features = intent.features.get(site.path, features)
            factor = factor if site.path in stock else 1.0
        norms[site.path] = DeclaredNorm(
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
    placements: dict[str, Placement] = {
        block.path: "pre" if block.placement == "residual-after-norm" and block.path not in stock else block.placement
        for block in inspection.blocks
    }
    return Baseline(
        source=source,
        norms=norms,
        placements=placements,
        final_norm=inspection.final_norm,
        others=tuple(path for path, _ in inspection.unrecognised),
        batch_norms={
            norm.path: DeclaredBatchNorm(
                eps=finite(norm.eps),
                share=finite(norm.share),
                gain=Values.of(norm.gain),
                bias=Values.of(norm.bias),
                mean=Values.of(norm.mean),
                variance=Values.of(norm.variance),
            )
            for norm in inspection.batch_norms
        },
    )
