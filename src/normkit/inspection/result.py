"""The results of an inspection as frozen values with JSON out: the contract between measuring and drawing.

Nothing here computes more than a lookup. Tensors never enter: every number is a Python float or int,
non-finite ones included (they become strings in JSON, which has none).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from normkit.inspection.quantities import (
    Attenuation,
    Foldedness,
    KeySelection,
    NormForm,
    Peak,
    RowStatistics,
    SiteGeometry,
    Spectrum,
    SumForm,
    Walk,
    WalkStep,
    WriterForm,
)
from normkit.inspection.training import Training
from normkit.spec import NormSpec

__all__ = [
    "SCHEMA_VERSION",
    "Attention",
    "Attenuation",
    "Block",
    "Check",
    "Finding",
    "Foldedness",
    "Inspection",
    "KeySelection",
    "ModelFacts",
    "NormForm",
    "Peak",
    "Placement",
    "Role",
    "RowStatistics",
    "Severity",
    "Site",
    "SiteGeometry",
    "Spectrum",
    "Status",
    "SumForm",
    "Walk",
    "WalkStep",
    "WriterForm",
]

SCHEMA_VERSION = 1

Severity = Literal["error", "warning", "note"]
Role = Literal["pre", "post", "output", "query-key", "embedding", "final", "unknown"]
Placement = Literal["pre", "post", "peri", "output-only", "none", "residual-after-norm", "unknown"]
Status = Literal["clean", "finding", "not checked", "not applicable"]


@dataclass(frozen=True, kw_only=True)
class Site:
    """One norm of the model, in forward order."""

    path: str
    """The module's path, or the enclosing module's path and the function, as in "model.layers.0:rms_norm"."""
    class_name: str
    """Class of the module, or name of the function."""
    order: int
    """Position in the forward pass, from 0."""
    calls: int
    """Calls seen while statistics were taken."""
    block: int | None
    """Index of the block it belongs to, or None outside the blocks."""
    role: Role
    spec: NormSpec
    """The formula, recovered from its behaviour."""
    confidence: float
    """Confidence of the formula, from 0 to 1."""
    evidence: tuple[str, ...]
    """Evidence for the formula, one line each."""
    input: RowStatistics
    """Statistics of the input."""
    output: RowStatistics
    """Statistics of the output."""
    attenuation: Attenuation
    """Effect of eps at the observed scale."""
    gain: Spectrum | None
    """Effective gain, or None."""
    bias: Spectrum | None
    """Bias, or None."""
    dtype: str
    """Dtype of the input, as in "float32"."""
    headroom_bits: float
    """log2 of the dtype's largest number over the largest magnitude seen at input or output."""
    statistics_headroom_bits: float | None
    """The same for the sum of squares if it is accumulated in 16 bits, else None."""
    geometry: SiteGeometry | None = None
    """Effect on the vectors, and the shape of the image; None if no row was sampled."""
    output_dtype: str = ""
    """Dtype of the output; "" if it was not seen."""
    forward_calls: int = 1
    """Calls in one forward pass: more than one where the norm is shared."""
    error: float = math.nan
    """Largest difference of a sampled output from its spec computed in float64, in units of `normkit.units` for plain
    code, in the coarsest dtype of input, gain and output; NaN where it was not measured."""
    gain_gradient_error: float = math.nan
    """Relative error of the gradient of its gain on random rows, against float64; NaN where it was not tried, as in
    float32."""
    factor: float = 1.0
    """A factor on the output besides the gain, where gain and bias show it."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One repeated block: a member of a ModuleList that maps (B, T, D) to itself."""

    path: str
    """The module's path."""
    index: int
    """Position among the blocks, from 0."""
    placement: Placement
    """Placement of the norms, from replays on scaled inputs."""
    output_slope: float
    """Slope of log |f(ax)| over log a at large a: 1 keeps the residual stream, 0 normalizes it."""
    branch_slope: float
    """The same for the branch f(ax) - ax: 0 behind a norm, 1 without one."""
    rows_normalized: bool | None
    """Rows leaving the block have one length each, once gain and bias are undone, as behind a norm; None where
    output_slope is near 1."""
    stream_in: RowStatistics
    """Statistics of the residual stream entering."""
    stream_out: RowStatistics
    """Statistics of the residual stream leaving."""
    branch_share: float = math.nan
    """|f(x) - x| over |x| of the median row, where its norms were looked for; NaN if that was not seen."""
    cosine: float = math.nan
    """Cosine between f(x) and x, of the median row."""
    peak: Peak | None = None
    """The largest element of the output; None if it was not looked up, as during training."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The logits of one attention call."""

    path: str
    """Path of the module that made the call."""
    block: int | None
    """Index of its block, or None."""
    source: Literal["sdpa", "softmax"]
    """"sdpa" (queries and keys seen) or "softmax" (the logits themselves seen)."""
    heads: int
    """Number of query heads."""
    head_dim: int
    """Features a head; 0 where only the logits were seen."""
    bound: float
    """Largest |q| times largest |k| times the softmax scale, over heads: no logit exceeds it in magnitude. Where only
    the logits were seen, their largest magnitude."""
    bounds: tuple[float, ...]
    """The same a head."""
    sampled_max: float
    """Largest magnitude of an exact logit over the sampled query rows and their allowed keys."""
    sampled_rows: int
    """Query rows sampled, a head counted once each."""
    entropy: float
    """Mean entropy of the sampled rows' attention, in nats."""
    entropy_min: float
    """Smallest mean entropy of a head, in nats."""
    uniform_entropy: float
    """Mean of log(allowed keys) over the same rows: what uniform attention would have."""
    spreads: tuple[float, ...] = ()
    """Distance of a row's largest logit from the mean of its allowed keys' logits, mean over the sampled rows of a
    head with two keys or more; NaN without one. A number added to a whole row, as by a key bias without a rotation,
    changes neither this nor the softmax; additive masks do not enter where queries and keys were seen."""
    saturations: tuple[float, ...] = ()
    """Share of the same rows in which one key takes more than 99 % of the attention."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something is wrong, or may be: what, where, how much, why it matters and what to do."""

    rule: str
    """Identifier of the rule, as in "A1"."""
    title: str
    """One line."""
    severity: Severity
    """One of "error", "warning" and "note"."""
    sites: tuple[str, ...]
    """Paths it applies to, in forward order; all sites of one cause are one finding."""
    measured: str
    """The measured value, in words with its unit."""
    threshold: str
    """The limit that the rule compares with."""
    source: str
    """Source of the threshold."""
    evidence: tuple[str, ...]
    """One line for each site or the most telling ones."""
    why: str
    """Consequence of the fault."""
    remedy: tuple[str, ...]
    """Remedies, the most likely first."""
    confirm: str
    """The test that confirms the remedy."""
    page: str = ""
    """Address of the rule's page in the documentation."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of one rule, clean rules included."""

    rule: str
    """Identifier of the rule."""
    title: str
    """The fault that the rule looks for."""
    status: Status
    """"clean", "finding", "not checked", or "not applicable" where there was nothing to look at."""
    reason: str = ""
    """Why it was not checked or not applicable; empty otherwise."""
    needs_run: bool = False
    """Not checked, as it shows only in a training run or a training step."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The inspected model."""

    name: str
    """Name given by the user."""
    class_name: str
    """Class of the model."""
    architecture: str
    """`model_type` of its config, or "" without one."""
    parameters: int
    """Number of parameters."""
    dtype: str
    """Dtype of the parameters, as in "float32"."""
    width: int
    """Features of the residual stream, or 0 if no block was found."""
    source: str
    """The input, as in "demo text" or "random token ids, seed 0"."""
    tokens: int
    """Tokens that entered statistics."""
    padding: int
    """Tokens left out as padding."""
    loss: float = math.nan
    """Mean cross-entropy of the next token in nats, of a causal language model; NaN of any other."""
    distinct: int | None = None
    """Distinct token ids among those that entered statistics; None where the batches hold none."""


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
    """Modules that change scale like a norm and are none that a spec describes, with the reason."""
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

    def write_html(self, path: str | Path) -> Path:
        """Write the report as one self-contained HTML file and return its path."""
        from normkit.report import html

        return html.write(self, Path(path))

    def _repr_html_(self) -> str:
        """The report in an isolated frame, for notebooks."""
        from normkit.report import html

        return html.frame(self)


def plain(value: object) -> object:
    """Dataclasses as dictionaries, tuples as lists, NaN and infinity as strings: what JSON can hold."""
    if isinstance(value, NormSpec):
        return {"formula": str(value), **value.to_json()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(member) for key, member in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
