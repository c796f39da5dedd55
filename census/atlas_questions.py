"""The questions that the atlas asks of a trained model: what is drawn, and the answer in words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from normkit.inspection.result import Inspection
from normkit.measurement.facts import Site
from normkit.text import counted, percent, significant

MASSIVE = 100
"""An activation is called massive where it is so many times the rms of its stream's median row. Sun et al. 2024,
arXiv:2402.17762, ask for 1,000 times the median magnitude and more than 100."""


@dataclass(frozen=True, kw_only=True)
class Sink:
    """The token that takes most of the attention in one block."""

    block: int
    share: float
    """Mean share of the attention that it takes, over heads and the later tokens that may see it."""
    token: str


@dataclass(frozen=True, kw_only=True)
class Portrait:
    """One model as it was measured."""

    name: str
    inspection: Inspection
    sinks: tuple[Sink, ...]

    @property
    def slug(self) -> str:
        """The name of its files."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower())

    @property
    def sites(self) -> tuple[Site, ...]:
        """The norms of the stream: those of queries and keys are left out."""
        return tuple(site for site in self.inspection.sites if site.role != "query-key")


Points = list[tuple[float, float]]
"""Depth from 0 to 1, and the value there."""


@dataclass(frozen=True)
class Question:
    """One question, and what answers it."""

    key: str
    """The name of its figure."""
    panel: str
    """The title of its panel in the figure of one model."""
    question: str
    """The heading of its section."""
    seed: str
    """The common statement that raises it."""
    label: str
    """The label of the vertical axis."""
    points: Callable[[Portrait], Points]
    answer: Callable[[Portrait], str]
    across: Callable[[Sequence[Portrait]], str]
    """The answer over all models, in a sentence."""
    scale: Literal["plain", "log", "share"] = "plain"
    """The vertical axis: linear, logarithmic, or linear from 0 to 1."""


def of_sites(value: Callable[[Site], float]) -> Callable[[Portrait], Points]:
    """One point a norm of the stream, in forward order."""

    def points(portrait: Portrait) -> Points:
        sites = portrait.sites
        return [(place / max(len(sites) - 1, 1), value(site)) for place, site in enumerate(sites)]

    return points


def of_blocks(values: Callable[[Portrait], Sequence[tuple[int, float]]]) -> Callable[[Portrait], Points]:
    """One point a block, from pairs of its index and a value."""

    def points(portrait: Portrait) -> Points:
        last = max((block.index for block in portrait.inspection.blocks), default=0)
        return [(index / max(last, 1), value) for index, value in values(portrait)]

    return points


def gain(site: Site) -> float:
    """The median entry of a gain, as it acts."""
    return site.gain.quantiles[3] if site.gain else math.nan


def eps_share(site: Site) -> float:
    """The share of the median row's output that eps takes: 1 - a."""
    return 1 - site.attenuation.median


def turn(site: Site) -> float:
    """The angle between input and output of the median row, in degrees."""
    return site.geometry.rotation[1] if site.geometry else math.nan


def elongation(site: Site) -> float:
    """Longest over shortest semi-axis of the ellipsoid."""
    return site.geometry.elongation if site.geometry else math.nan


def peaks(portrait: Portrait) -> list[tuple[int, float]]:
    """The largest activation after each block over the rms of the median row."""
    blocks = [block for block in portrait.inspection.blocks if block.peak is not None]
    return [(block.index, abs(block.peak.value) / block.stream_out.rms_median) for block in blocks]


def selected(portrait: Portrait) -> list[tuple[int, float]]:
    """The share of keys that some query of their head can select."""
    found = [each for each in portrait.inspection.selections if each.block is not None]
    return [(each.block, each.after) for each in found if not math.isnan(each.after)]


def about_gains(portrait: Portrait) -> str:
    """The sentence on how far gains are from 1."""
    held = [site for site in portrait.sites if site.gain is not None]
    if not held:
        return "It has no gains."
    middles = [gain(site) for site in held]
    wide = max(held, key=lambda site: site.gain.quantiles[6] - site.gain.quantiles[0])
    negative = sum(site.gain.negative * site.gain.size for site in held) / sum(site.gain.size for site in held)
    offset = held[0].spec.weight_offset
    stored = f" The file stores them less {offset:g}." if offset else ""
    return (
        f"Median gains lie between {significant(min(middles))} and {significant(max(middles))}. The widest norm, "
        f"`{wide.path}`, has entries from {significant(wide.gain.quantiles[0])} to "
        f"{significant(wide.gain.quantiles[6])}; {percent(negative)} of all entries are negative.{stored}"
    )


def about_eps(portrait: Portrait) -> str:
    """The sentence on the norm whose rows eps shortens most."""
    most = max(portrait.sites, key=eps_share)
    felt = [site for site in portrait.sites if site.attenuation.share_below_99 > 0]
    rows = f"{len(felt) or 'None'} of {counted(len(portrait.sites), 'norm')} have rows that lose more than 1 %."
    return (
        f"At most {percent(eps_share(most))} of the median row's length, at `{most.path}` (eps {most.spec.eps:g}, "
        f"rms {significant(most.input.rms_median)}). {rows}"
    )


def about_mean(portrait: Portrait) -> str:
    """The sentence on the energy along all-ones."""
    sites = portrait.sites
    times = [site.input.mean_energy * site.input.features for site in sites]
    most = max(sites, key=lambda site: site.input.mean_energy)
    centred = sites[0].spec.centring.numerator
    does = "Centring removes" if centred else "Centring would remove"
    return (
        f"{does} {percent(median(site.input.mean_energy for site in sites))} of a row's energy at the median norm, "
        f"{significant(median(times))} times as much as of a random direction (1/n), and at most "
        f"{percent(most.input.mean_energy)}, at `{most.path}`."
    )


def about_turns(portrait: Portrait) -> str:
    """The sentence on the smallest and the largest angle."""
    known = [site for site in portrait.sites if site.geometry is not None]
    most, least = max(known, key=turn), min(known, key=turn)
    centring = max(site.geometry.rotation_without_affine[1] for site in known)
    return (
        f"Between {turn(least):.0f}° (`{least.path}`) and {turn(most):.0f}° (`{most.path}`) for the median row. "
        f"Centring alone turns by {centring:.1f}° at most; gain and bias do the rest."
    )


def about_axes(portrait: Portrait) -> str:
    """The sentence on the axes of the ellipsoids."""
    known = [site for site in portrait.sites if not math.isnan(elongation(site))]
    if not known:
        return "No norm of it maps to a single ellipsoid."
    most = max(known, key=elongation)
    gone = sum(site.geometry.vanishing_gains for site in known)
    flat = f" {counted(gone, 'gain')} in all are 0 or as good as: there the ellipsoid is flat." if gone else ""
    return (
        f"The longest axis is {significant(median(map(elongation, known)))} times the shortest at the median norm, "
        f"{significant(elongation(most))} times at `{most.path}`.{flat}"
    )


def about_peaks(portrait: Portrait) -> str:
    """The sentence on the block in which massive activations begin."""
    ratios = peaks(portrait)
    if not ratios:
        return "Its stream was not measured between blocks."
    born = next((index for index, ratio in ratios if ratio > MASSIVE), None)
    at, most = max(ratios, key=lambda pair: pair[1])
    peak = next(block.peak for block in portrait.inspection.blocks if block.index == at)
    where = f"feature {peak.feature} of token {peak.position} ({token(peak.token)})"
    if born is None:
        return (
            f"It has none: the largest activation is {significant(most)} times the stream's rms, {where}, block {at}."
        )
    return (
        f"In block {born}. The largest activation is {significant(most)} times the stream's rms, after block {at}: "
        f"{where}, {significant(peak.value)}."
    )


def about_sinks(portrait: Portrait) -> str:
    """The sentence on the token that takes most of the attention."""
    if not portrait.sinks:
        return "Its attention could not be read."
    most = max(portrait.sinks, key=lambda sink: sink.share)
    third = sum(sink.share > 1 / 3 for sink in portrait.sinks)
    return (
        f"In {third or 'none'} of {counted(len(portrait.sinks), 'block')} one token takes more than a third of the "
        f"attention of those that see it; most in block {most.block}: {percent(most.share)} on {token(most.token)}."
    )


def about_keys(portrait: Portrait) -> str:
    """The sentence on the keys that a query can select."""
    found = [each for each in portrait.inspection.selections if not math.isnan(each.after)]
    if not found:
        return "Its keys were not seen."
    least = min(found, key=lambda each: each.after)
    before = [each.before for each in found if each.before is not None]
    entering = f"; of the rows that enter, {percent(min(before))} or more" if before else ""
    return (
        f"{percent(median(each.after for each in found))} of the keys at the median attention, at least "
        f"{percent(least.after)} (`{least.path}`); {least.sampled} of {least.keys} keys were tried{entering}."
    )


def about_folding(portrait: Portrait) -> str:
    """The sentence on the norms that fold, and on a reason why others do not."""
    form = portrait.inspection.foldedness
    if form is None:
        return f"Not known: {portrait.inspection.foldedness_unknown}."
    free = [norm for norm in form.norms if not norm.reason]
    defects = [norm.gain_defect for norm in form.norms if norm.gain_defect is not None]
    away = f" Gains are {significant(median(defects))} from 1 (rms, median norm)." if defects else ""
    reasons = sorted({norm.reason for norm in form.norms if norm.reason})
    against = f" Of the others: {reasons[0]}." if reasons else ""
    return f"{len(free)} of {counted(len(form.norms), 'norm')} can give gain and bias to their readers.{away}{against}"


def across_gains(portraits: Sequence[Portrait]) -> str:
    """The number of norms whose gain stays near 1."""
    middles = [gain(site) for each in portraits for site in each.sites if site.gain]
    near = sum(abs(middle - 1) < 0.1 for middle in middles)
    return f"{near} of {counted(len(middles), 'norm')} have a median gain within 0.1 of 1."


def across_eps(portraits: Sequence[Portrait]) -> str:
    """The models in which eps shortens a median row by more than 1 %."""
    felt = [each.name for each in portraits if max(map(eps_share, each.sites)) > 0.01]
    return f"The median row of some norm loses more than 1 % in {some(felt, portraits)}."


def across_means(portraits: Sequence[Portrait]) -> str:
    """The number of norms with little energy along all-ones."""
    shares = [site.input.mean_energy for each in portraits for site in each.sites]
    small = sum(share < 0.01 for share in shares)
    return f"At {small} of {counted(len(shares), 'norm')} less than 1 % of a row's energy lies along all-ones."


def across_turns(portraits: Sequence[Portrait]) -> str:
    """The angle by which the median norm turns the median row."""
    turns = [turn(site) for each in portraits for site in each.sites if site.geometry]
    return f"The median norm turns the median row by {median(turns):.0f}°, mostly by its gain."


def across_axes(portraits: Sequence[Portrait]) -> str:
    """The number of ellipsoids that are near a sphere."""
    ratios = [value for each in portraits for value in map(elongation, each.sites) if not math.isnan(value)]
    round_ones = sum(ratio < 2 for ratio in ratios)
    return f"{round_ones} of {counted(len(ratios), 'ellipsoid')} have axes within a factor of 2 of each other."


def across_peaks(portraits: Sequence[Portrait]) -> str:
    """The models that have massive activations."""
    having = [each.name for each in portraits if any(ratio > MASSIVE for _, ratio in peaks(each))]
    return f"An activation is more than {MASSIVE} times the rms of its stream in {some(having, portraits)}."


def across_sinks(portraits: Sequence[Portrait]) -> str:
    """The models that have attention sinks."""
    having = [each.name for each in portraits if any(sink.share > 1 / 3 for sink in each.sinks)]
    return f"One token takes more than a third of the attention in some block of {some(having, portraits)}."


def across_keys(portraits: Sequence[Portrait]) -> str:
    """The models in which no tried key is hidden."""
    seen = [each for each in portraits if selected(each)]
    free = [each.name for each in seen if all(share == 1 for _, share in selected(each))]
    return f"Every key that was tried can be selected in {some(free, seen)} whose keys were seen."


def some(names: Sequence[str], portraits: Sequence[Portrait]) -> str:
    """The number of named models out of all, and their names."""
    return f"{len(names) or 'none'} of {counted(len(portraits), 'model')}" + (f" ({', '.join(names)})" if names else "")


def token(text: str) -> str:
    """A token as it can stand in a table of Markdown."""
    return f"`{text!r}`".replace("|", "\\|") if text else "unknown"


QUESTIONS = (
    Question(
        "gains",
        "Gains",
        "How far do gains move from 1?",
        "A gain starts at 1 and may let the network find its own scale for each feature.",
        "median gain",
        of_sites(gain),
        about_gains,
        across_gains,
        "log",
    ),
    Question(
        "eps",
        "eps",
        "Does eps change anything?",
        "eps is there so that nothing is divided by 0, and is said to be small enough to forget.",
        "1 - |y| with eps / |y| without",
        of_sites(eps_share),
        about_eps,
        across_eps,
        "log",
    ),
    Question(
        "all-ones",
        "The direction of all ones",
        "Does training use the mean that centring removes?",
        "The direction of all ones looks arbitrary: why project it out, and not another?",
        "energy along all-ones",
        of_sites(lambda site: site.input.mean_energy),
        about_mean,
        across_means,
        "log",
    ),
    Question(
        "turns",
        "Turns",
        "How far does a norm turn a vector?",
        "Scaling keeps the direction; centring, gain and bias do not.",
        "angle, degrees",
        of_sites(turn),
        about_turns,
        across_turns,
    ),
    Question(
        "axes",
        "Ellipsoids",
        "What does the ellipsoid look like?",
        "The gain makes an ellipsoid of the sphere.",
        "longest / shortest axis",
        of_sites(elongation),
        about_axes,
        across_axes,
        "log",
    ),
    Question(
        "massive",
        "Massive activations",
        "Where are massive activations born?",
        "Norms keep activations in range. The stream between them has no norm.",
        "largest / rms of the stream",
        of_blocks(peaks),
        about_peaks,
        across_peaks,
        "log",
    ),
    Question(
        "sinks",
        "Attention sinks",
        "Which token takes the attention?",
        "Norms are said to keep attention scores from exploding. One token may still take most of it.",
        "share of the attention",
        of_blocks(lambda portrait: [(sink.block, sink.share) for sink in portrait.sinks]),
        about_sinks,
        across_sinks,
        "share",
    ),
    Question(
        "keys",
        "Selectable keys",
        "Can every key be selected?",
        "On a sphere each point can be; in the few features of a head a key inside the hull cannot.",
        "share of selectable keys",
        of_blocks(selected),
        about_keys,
        across_keys,
        "share",
    ),
)
