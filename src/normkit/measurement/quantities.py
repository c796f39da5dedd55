"""The parts of what is measured: statistics of rows, the effect of eps, entries of a gain, a token's way, weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from normkit.spec import NormSpec


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
    """What one rounding in the coarsest type of the call changes, of the number that is rounded: half the machine
    epsilon. A norm in 16 bits rounds two or three times on its way."""


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


@dataclass(frozen=True, kw_only=True)
class NormForm:
    """The distance of one norm from a norm whose gain and bias have been folded into its readers."""

    path: str
    """As the model names it."""
    kind: Literal["layer", "rms"]
    """"layer" subtracts the mean, "rms" does not; as it behaves where it was seen, else as its family has it."""
    gain_defect: float | None
    """Root mean square of gain - 1, the gain as it acts; None without a gain."""
    largest_bias: float | None
    """Largest magnitude in its bias; None without one."""
    readers: tuple[str, ...]
    """The linear maps that read it."""
    reason: str
    """Why gain and bias cannot leave it as the model is; "" where all that reads it are linear maps that may take them.
    """


@dataclass(frozen=True, kw_only=True)
class WriterForm:
    """The distance of one writer from centred: a table, or weight and bias of a linear map."""

    name: str
    """Path of the map, or name of the table."""
    share: float
    """Share of its energy along all-ones, as `normkit.geometry.centred_defect`: 0 centred, near 1 / width at random."""
    vectors: int
    """Vectors of that width in it: rows of a table; inputs of a map, and 1 for its bias."""
    row_mean: float | None
    """Row mean of a table: root mean square over its rows of a row's mean; else None."""
    is_centred: bool
    """In each of its tensors that share is no more than what rounding leaves."""
    reason: str
    """Why it alone cannot be centred as the model is, where its sum can be; else ""."""


@dataclass(frozen=True, kw_only=True)
class SumForm:
    """The distance of a sum that norms read, as the residual stream, from a sum without a mean."""

    name: str
    """As its family calls it."""
    width: int
    """Features of a row; a random tensor has 1 / width of its energy along all-ones."""
    writers: tuple[WriterForm, ...]
    """The terms of the sum, without the outputs of norms."""
    reason: str
    """Why it cannot be centred without changing what the model computes; "" where it can."""


@dataclass(frozen=True, kw_only=True)
class Foldedness:
    """The distance of a model from folded and from centred, from its weights alone."""

    norms: tuple[NormForm, ...]
    """In the order of the model."""
    sums: tuple[SumForm, ...]
    """In the order in which they are read."""
    oddly_centred: tuple[str, ...]
    """Tables and matrices that are centred although an RMSNorm sees their mean, while others that are added to the same
    sum are not: what a tool leaves that centres embeddings whatever reads them."""
