"""The measured facts of a model: its norms, its blocks, its attention, the model as a whole, and the parts of these.

Frozen values with numbers of Python, never a tensor.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from normkit.conventions.eps import eps_in
from normkit.spec import NormSpec

Role = Literal["pre", "post", "output", "query-key", "embedding", "final", "unknown"]
Placement = Literal["pre", "post", "peri", "output-only", "in-branch", "none", "residual-after-norm", "unknown"]


def place_of(path: str) -> str:
    """The path with its numbers left out: the same for norms of one name in all blocks."""
    return re.sub(r"\d+", "", path)


@dataclass(frozen=True, kw_only=True)
class RowStatistics:
    """Streaming statistics over the rows of one tensor; masked rows never enter."""

    rows: int
    """Rows counted."""
    features: int
    """Features a row, n."""
    rms_min: float
    """Smallest root mean square of a row."""
    rms_quantiles: tuple[float, float, float]
    """5 %, 50 % and 95 % quantile of the rows' rms, read off the histogram (to 1/8 octave)."""
    rms_max: float
    """Largest rms of a row."""
    histogram: tuple[tuple[int, int], ...]
    """Pairs (bin, count); a row of rms r falls into bin floor(8 log2 r); zero rows are left out."""
    zero_rows: int
    """Rows that are exactly 0."""
    mean_energy: float
    """Mean over rows of n mean(x)**2 / |x|**2, the share of energy along the all-ones direction."""
    angle_to_ones: float
    """Mean over rows of the angle between x and the all-ones direction, in degrees, 0 to 180."""
    absmax: float
    """Largest magnitude of an element."""
    nonfinite: int
    """Rows that hold NaN or infinity, or whose mean square leaves the range of float32; they enter nothing else."""
    kurtosis: float = math.nan
    """Mean over rows of E[(x - mean)^4] / var^2, 3 for Gaussian rows; NaN where it was not measured."""

    @property
    def rms_median(self) -> float:
        """The median row's root mean square."""
        return self.rms_quantiles[1]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The element of largest magnitude in a stream (B, T, n); of equal ones the first."""

    value: float
    """The element, with its sign."""
    feature: int
    """Its index along the features."""
    position: int
    """Position of its token in its text."""
    token: str = ""
    """The token as text; "" if it is not known."""


@dataclass(frozen=True, kw_only=True)
class Attenuation:
    """The effect of eps on the rows of one site: a = |y| with eps over |y| without, 1 if eps does nothing.

    For eps inside the root a = sqrt(v / (v + eps)), outside sqrt(v) / (sqrt(v) + eps), clamp min(1, sqrt(v) / eps).
    """

    median: float
    """Median of a over the rows."""
    smallest: float
    """Smallest of a over the rows."""
    share_below_99: float
    """Share of rows with a < 0.99."""
    share_below_90: float
    """Share of rows with a < 0.9."""


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """The entries of one gain (as it acts, its offset added) or bias."""

    size: int
    """Number of entries."""
    mean: float
    """Mean of the entries."""
    quantiles: tuple[float, float, float, float, float, float, float]
    """0, 5, 25, 50, 75, 95 and 100 % quantile of the entries."""
    negative: float
    """Share of entries below 0."""
    at_initialisation: bool
    """Every entry is exactly 1 (gain) or 0 (bias)."""
    nonfinite: int
    """Entries that are NaN or infinite."""
    outliers: tuple[tuple[int, float], ...]
    """Pairs (index, value) of entries far from the median (more than 6 robust standard deviations)."""
    digest: str = ""
    """Digest of the entries in float32, in their order: two that agree are the same numbers; "" where not taken."""
    members: str = ""
    """Digest of the sorted magnitudes: it stays if entries change places or signs."""
    distinct: int = 0
    """Number of different finite values; 0 if they were not counted."""


@dataclass(frozen=True, kw_only=True)
class SiteGeometry:
    """The effect of one norm on a sample of its rows, and the shape that its gain gives their image."""

    rows: int
    """Rows sampled, spread evenly over each batch; those of padding and those without a direction (zero or not finite,
    before or after) never enter."""
    rotation: tuple[float, float, float]
    """5 %, 50 % and 95 % quantile of the angle between input and output, in degrees."""
    rotation_without_affine: tuple[float, float, float]
    """The same for the normalized row before gain and bias: the turn by centring alone."""
    spread_in: float
    """Longest over shortest row (95 % over 5 % quantile) of the input."""
    spread_out: float
    """The same ratio of the output."""
    dimension: int | None
    """Dimension of the image at eps = 0, with vanishing gains as 0; None where it is no single ellipsoid (rows in
    groups, heads with gains of their own, a mean that counts on one side of the fraction bar only)."""
    semi_axes: tuple[float, float, float] | None
    """Smallest, median and largest semi-axis of that image over sqrt(n); None likewise."""
    vanishing_gains: int
    """Entries of the gain that are 0 or as good as (2**-24 of the largest, or less): their features leave as the bias
    alone."""

    @property
    def elongation(self) -> float:
        """Longest over shortest semi-axis of the image; NaN where there is no image."""
        return math.nan if self.semi_axes is None else self.semi_axes[2] / self.semi_axes[0]

    @property
    def is_unit_sphere(self) -> bool:
        """The image is the sphere on which rows lie before any gain."""
        return self.semi_axes is not None and all(math.isclose(axis, 1.0, rel_tol=1e-6) for axis in self.semi_axes)


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
    input_gradient_error: float = math.nan
    """Relative error of the gradient of its input on random rows, against float64; NaN where it has no gradient."""
    factor: float = 1.0
    """A factor on the output besides the gain, where gain and bias show it."""
    row: str = "token"
    """The unit that a row is, or is a part of: "token"; of images "patch", "pixel", "channel", "channel group",
    "query" or "image"; of sound "frame", "channel", "channel group" or "recording"."""

    @property
    def eps_level(self) -> float:
        """The rms of a row whose root, before eps is added, is as long as eps: there eps begins to count."""
        eps = max(eps_in(self.dtype, self.spec.eps), 0.0)
        features = self.input.features
        return self.spec.placement.length(eps) * math.sqrt(self.spec.divisor.count(features) / features)


@dataclass(frozen=True, kw_only=True)
class BatchNorm:
    """A norm with running statistics: what they are, and what the data has in their place."""

    path: str
    """The module's path."""
    channels: int
    """Channels with statistics of their own."""
    gain: Spectrum | None
    """Its gain, or None."""
    bias: Spectrum | None
    """Its bias, or None."""
    mean: Spectrum
    """Its running means."""
    variance: Spectrum
    """Its running variances."""
    eps: float
    """The number added to the variance; NaN where it is not known."""
    share: float
    """Share of the running mean that one batch replaces in training, as observed; NaN where that changes from batch to
    batch, or could not be tried."""
    batches: int
    """Batches that it has counted; -1 where it counts none."""
    is_gathered: bool
    """Some channel's running mean is not 0, or its variance not 1."""
    is_moved: bool
    """Some entry of its bias is not 0, or its gain is neither 1 nor, as at the end of a branch, 0 in all entries."""
    is_live: bool
    """It is in training mode: it normalizes by the batch, and updates its statistics."""
    is_trained: bool
    """Its gain or bias takes gradients; True where it has neither."""
    zero_gains: int
    """Entries of the gain that are exactly 0."""
    flat: int
    """Channels whose running variance is below eps."""
    eps_share: float
    """eps over running variance + eps, of the median channel."""
    correction: float
    """The c in the sum of squares over N - c that a batch of N numbers a channel adds to its running variance: 1 in
    PyTorch, 0 in flax; NaN where `share` is, or where it is no whole number."""
    own_correction: float
    """The same of the variance that it divides by in training: 0 nearly everywhere; NaN where it is not known."""
    start_share: float
    """Share of the median channel's running variance that is left of the 1 before the first counted batch; NaN where
    no batch was counted, `share` is not known, or some channel has less than what would be left."""
    samples: int = 0
    """Samples of the data that were seen; 0 where no data was."""
    rows: int = 0
    """Numbers a channel that were seen, all samples together."""
    call_rows: int = 0
    """Numbers a channel in the smallest call."""
    call_samples: int = 0
    """Samples in the smallest call, whose statistics they share; 0 where each has its own, or no data was seen."""
    change: float = math.nan
    """How far the output moves where the statistics of the data replace the running ones, of the median channel: root
    mean square over the larger of the two outputs' deviations, both without gain and bias."""
    first_change: float = math.nan
    """The same in the first measured step of a run; NaN outside of a run."""
    largest_change: float = math.nan
    """The change of the channel that moves most."""
    channel: int = -1
    """That channel."""
    shift: float = math.nan
    """There, the mean of the data less the running one, in running deviations."""
    stretch: float = math.nan
    """There, the deviation of the data over the running one."""
    sampling: float = math.nan
    """The change that the sampling of the data alone would make, of the median channel: half of that between one half
    of the samples and the other. NaN for a single sample."""
    refolded: float = math.nan
    """How far the data's deviations are, over the channels, from what they were if what reads into the norm had been
    multiplied by gain / sqrt(running variance + eps), over how far they are from the running ones: logarithms, root
    mean square. Near 0 where a folded norm is still applied."""
    repeated: float = math.nan
    """Share of the samples of the data that are equal, bit for bit, to an earlier one of their batch."""
    padding: float = math.nan
    """Share of the rows that entered it that a mask of the batch tells to be padding; NaN without such a mask."""
    dropout: float = math.nan
    """Deviation of what enters with the rest of the model in training mode, over that in evaluation mode, of the median
    channel: 1 unless dropout is in front. NaN where it was not tried."""
    behind: str = ""
    """Path of the last dropout that was called before it, where `dropout` is not 1."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One repeated block: a member of a list that maps (B, T, D), (N, D) or maps of pixels to the same sizes."""

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
    """Tokens that entered statistics; or images, recordings or samples, as `unit` says."""
    padding: int
    """Tokens left out as padding."""
    loss: float = math.nan
    """Mean cross-entropy of the next token in nats, of a causal language model; NaN of any other."""
    uniform_loss: float = math.nan
    """The loss of a uniform guess, log(vocabulary), in nats; NaN where the model has no such loss, and where nothing
    says that the tokens are a text."""
    distinct: int | None = None
    """Distinct token ids among those that entered statistics; None where the batches hold none, or images or sound
    beside them."""
    unit: str = "token"
    """The unit that `tokens` counts: "token", "image", "recording", or "sample" where a batch is (B, n) of numbers."""
