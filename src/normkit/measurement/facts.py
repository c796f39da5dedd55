"""What is measured of a model: its norms, its blocks, its attention, the model as a whole.

Frozen values with numbers of Python, never a tensor; `normkit.measurement.quantities` holds the parts they are made of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from normkit.conventions.eps import eps_in
from normkit.measurement.quantities import Attenuation, Peak, RowStatistics, SiteGeometry, Spectrum
from normkit.spec import NormSpec

Role = Literal["pre", "post", "output", "query-key", "embedding", "final", "unknown"]
Placement = Literal["pre", "post", "peri", "output-only", "none", "residual-after-norm", "unknown"]


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

    @property
    def eps_level(self) -> float:
        """The rms of a row whose root, before eps is added, is as long as eps: there eps begins to count."""
        eps = max(eps_in(self.dtype, self.spec.eps), 0.0)
        features = self.input.features
        return self.spec.placement.length(eps) * math.sqrt(self.spec.divisor.count(features) / features)


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
