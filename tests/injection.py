"""The injector: faults planted in clean models, and what an inspection is to say of each.

Whoever wrote this wrote none of the rules. A fault is data: the rule that is to come first in the report, the families
that it can befall, and a function that plants it at random and says where.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

import altered_norms
import normkit as nk
from normkit.inspection.result import Inspection, infer
from normkit.rules.finding import Finding
from planting import (
    Plant,
    applied_twice,
    broken_weight,
    converted_twice,
    dropped,
    final,
    formula,
    gains,
    halved,
    heads,
    idle,
    in_blocks,
    large_logits,
    missing,
    near_overflow,
    never_converted,
    on_stream,
    on_the_branch,
    other_eps,
    post_for_pre,
    redrawn,
    residual_after_norm,
    shared,
    unnormalized,
    without_offset,
)
from subjects import Subject, subject

LLAMA_LIKE = ("Llama", "Mixtral", "Qwen3", "Gemma")
BARE, STUDY = ("BareLayer", "BareRMS"), ("StudyLayer", "StudyRMS")
PLAIN = ("PlainLayer", "PlainRMS", *STUDY)
PRE = (*LLAMA_LIKE, "GPT2", "PlainLayer", "PlainRMS", *STUDY)
ENCODERS, HALF = ("Bert", "T5Encoder"), ("Llama", "Olmo2", "GPT2", "Bert")
SHIPPED = ("ShippedLayer", "ShippedRMS")
RMS = ("Llama", "Mixtral", "Qwen3", "Gemma", "Gemma2", "Gemma3Text", "Olmo2", "T5Encoder", "PlainRMS", "StudyRMS")
CENTRED = (
    "GPT2",
    "GPTNeoX",
    "Bloom",
    "OPT",
    "Falcon",
    "StableLm",
    "Cohere",
    "Nemotron",
    "Bert",
    "PlainLayer",
    "StudyLayer",
)
ALL = (*RMS, *CENTRED)
# OPT's MLP and the norm before it see all tokens of all samples as one axis.
BATCHED = tuple(family for family in ALL if family != "OPT")
OFFSET = ("Gemma", "Gemma2", "Gemma3Text", "Nemotron")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: In a few words.
        rules: The rule that is to come first; the first of several is the name of the cause, the others name it too.
        families: That it can befall.
        plant: Plants it in a model, in place; returns the paths that the finding is to name, and no other.
        options: Of the model, as `subject` takes them.
        spreads: It is felt by all that follows: of the named places, the first counts.
    """

    name: str
    rules: tuple[str, ...]
    families: tuple[str, ...]
    plant: Plant
    options: dict[str, Any] = field(default_factory=dict)
    spreads: bool = False


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One fault planted once, and what was reported.

    Attributes:
        fault: Its name.
        family: Where.
        planted: The paths that it was planted at; none where it is of the whole model.
        expected: The rules that name it.
        reported: Rule, severity and sites of each finding, in the report's order.
        spreads: Of the fault.
        is_timed: The report says in which step and where it began, of a fault that strikes in a step of a run.
    """

    fault: str
    family: str
    planted: tuple[str, ...]
    expected: tuple[str, ...]
    reported: tuple[tuple[str, str, tuple[str, ...]], ...]
    spreads: bool
    is_timed: bool = True

    @property
    def is_named(self) -> bool:
        """The right rule comes first."""
        return bool(self.reported) and self.reported[0][0] in self.expected

    @property
    def is_found(self) -> bool:
        """And it names the planted places, and no others; of what spreads, the planted one first, and when."""
        if not self.is_named or not self.planted or not self.is_timed:
            return self.is_named and self.is_timed
        sites = self.reported[0][2]
        if not self.spreads:
            return set(sites) == set(self.planted)
        # A weight of the planted module is the planted place, told more closely.
        return bool(sites) and f"{sites[0]}.".startswith(f"{self.planted[0]}.")


def attempt(fault: Fault, family: str, seed: int) -> Trial:
    """Plant a fault in a fresh model and inspect that."""
    chance = random.Random(f"{fault.name} {family} {seed}")
    torch.manual_seed(seed)
    clean = subject(family, **fault.options)
    declared = None
    if clean.is_declared:
        declared = infer(nk.inspect(clean.model, clean.batch), source="the intent file")
    planted = fault.plant(clean.model, chance)
    found = nk.inspect(clean.model, clean.batch, intent=declared)
    return Trial(
        fault=fault.name,
        family=family,
        planted=planted,
        expected=fault.rules,
        reported=summary(found.findings),
        spreads=fault.spreads,
    )


def inspected(clean: Subject) -> Inspection:
    """The inspection of a clean model; a second one, held to what the first one saw, where nothing else tells."""
    first = nk.inspect(clean.model, clean.batch)
    if not clean.is_declared:
        return first
    return nk.inspect(clean.model, clean.batch, intent=infer(first, source="the intent file"))


def summary(findings: tuple[Finding, ...]) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Rule, severity and sites of findings."""
    return tuple((found.rule, found.severity, found.sites) for found in findings)


def _fault(
    name: str, rules: str, families: tuple[str, ...], plant: Plant, *, spreads: bool = False, **options: Any
) -> Fault:
    return Fault(
        name=name, rules=tuple(rules.split()), families=families, plant=plant, options=options, spreads=spreads
    )


FAULTS: tuple[Fault, ...] = (
    _fault("eps 10 to 10,000 times too large, one norm", "A1", (*ALL, *SHIPPED), other_eps(every=False)),
    _fault("eps 10 to 10,000 times too large, all norms", "A1", (*ALL, *SHIPPED), other_eps(every=True)),
    _fault("eps outside the root", "A2", (*ALL, *BARE), formula(altered_norms.eps_outside)),
    _fault("eps as a lower bound", "A3", ALL, formula(altered_norms.eps_as_clamp)),
    _fault("no eps", "A3 A10", ALL, formula(altered_norms.no_eps)),
    _fault("unbiased variance", "A4", (*CENTRED, "BareLayer"), formula(altered_norms.unbiased)),
    _fault("square in place of the root", "A5", (*ALL, *BARE), formula(altered_norms.squared, on_stream)),
    _fault("no root", "A5", (*ALL, *BARE), formula(altered_norms.rootless, on_stream)),
    _fault("eps of the dtype", "A6 A1", RMS, formula(altered_norms.eps_of_the_dtype), dtype=torch.bfloat16),
    _fault("eps lost in float16", "A7", HALF, formula(altered_norms.eps_lost), dtype=torch.float16),
    _fault("eps times the largest square", "A8", (*ALL, *BARE), formula(altered_norms.rescaled)),
    _fault("E[x^2] - E[x]^2", "A9", (*CENTRED, "BareLayer"), formula(altered_norms.cancelling)),
    _fault("a variance below 0", "A9 A10", (*CENTRED, "BareLayer"), formula(altered_norms.negative)),
    _fault("the 1 of 1 + weight missed, one norm", "B1", OFFSET, formula(altered_norms.offset_missed)),
    _fault("the 1 of 1 + weight missed, all norms", "B1", OFFSET, formula(altered_norms.offset_missed, every=True)),
    _fault("the 1 of 1 + weight missed, one norm of a spec", "B1", ("StudyOffset",), without_offset),
    _fault("weights less 1 in a plain class", "B1", ("Llama", "Olmo2", "GPT2", "Bloom", "Cohere"), never_converted),
    _fault("a 1 added twice, one norm", "B2", ("Llama", "GPT2", *OFFSET), formula(altered_norms.offset_doubled)),
    _fault("the 1 in the weights as well", "B2", ("Gemma", "Gemma2", "Gemma3Text"), converted_twice),
    _fault(
        "the 1 added in bfloat16",
        "B3",
        ("Gemma", "Gemma2", "Gemma3Text"),
        formula(altered_norms.offset_in_16_bits),
        dtype=torch.bfloat16,
    ),
    _fault(
        "gain drawn from N(0, 0.02) in a fresh model",
        "B5",
        ("Llama", "GPT2", "Bert", "Cohere", *PLAIN, *BARE),
        gains(redrawn),
        trained=False,
    ),
    _fault("gains of a quarter of the norms never loaded", "B6", (*ALL, *SHIPPED, *BARE), dropped),
    _fault(
        "gain gradient summed in 16 bits",
        "B9",
        ("Llama", "Qwen3", "Mixtral"),
        formula(altered_norms.gain_gradient_in_16_bits, on_stream),
        dtype=torch.bfloat16,
    ),
    _fault("half of a gain at 0", "B10", (*PLAIN, *BARE, "Llama", "Olmo2", "GPT2"), gains(halved)),
    _fault(
        "over time in place of features", "C1 C4 C6", (*BATCHED, *BARE), formula(altered_norms.over_time, on_stream)
    ),
    _fault("over heads in place of features", "C1", ("Qwen3",), formula(altered_norms.over_heads, heads)),
    _fault("queries or keys over all heads", "C2", ("Qwen3",), formula(altered_norms.over_all_heads, heads)),
    _fault("queries or keys per head, meant over all", "C2", ("Olmo2",), formula(altered_norms.per_head, heads)),
    _fault(
        "statistics over time and features",
        "C4 C1",
        (*(name for name in BATCHED if name not in ENCODERS), *BARE),
        formula(altered_norms.over_time_and_features, on_stream),
    ),
    _fault("statistics over the batch", "C5", (*BATCHED, *BARE), formula(altered_norms.over_samples, on_stream)),
    _fault(
        "statistics over batch and time", "C5 C4", (*BATCHED, *BARE), formula(altered_norms.over_the_batch, on_stream)
    ),
    _fault("padding in the statistics", "C6 C1", ENCODERS, formula(altered_norms.over_time_and_features, on_stream)),
    _fault("residual taken after the norm", "D1", (*PRE, *BARE), residual_after_norm),
    _fault("post-norm in one block, pre is declared", "D2", PLAIN, post_for_pre),
    _fault("norm of the branch's output, pre or post is declared", "D2", (*PLAIN, "PlainPost"), on_the_branch),
    _fault(
        "no final norm",
        "D3",
        (*PRE, "GPTNeoX", "Bloom", "OPT", "Cohere", "Olmo2", *SHIPPED),
        missing(lambda model: [final(model)]),
    ),
    _fault(
        "a norm of a block missing",
        "D3",
        (*PRE, "Bloom", "OPT", "Cohere", "Olmo2", "Bert", "Gemma2", *SHIPPED),
        missing(in_blocks),
    ),
    _fault("one norm at two places", "D4", (*PRE, *BARE, "Bloom", "OPT", "Olmo2", "Bert"), shared),
    _fault("normalized twice in a row", "D5", (*PRE, *BARE), applied_twice, trained=False),
    _fault("a norm that overwrites its input", "D6", (*ALL, *BARE), formula(altered_norms.in_place, on_stream)),
    _fault(
        "another order of casts",
        "E1",
        ("Llama", "Qwen3", "Olmo2", "Mixtral"),
        formula(altered_norms.other_cast),
        dtype=torch.bfloat16,
    ),
    _fault(
        "statistics in bfloat16",
        "E2",
        ("Llama", "Qwen3", "Olmo2", "Gemma", "GPT2", "Bert", *BARE),
        formula(altered_norms.in_16_bits),
        dtype=torch.bfloat16,
    ),
    _fault("statistics in float16", "E2 A7", HALF, formula(altered_norms.in_16_bits), dtype=torch.float16),
    _fault("NaN in one gain", "E3", (*ALL, *SHIPPED, *BARE), broken_weight, spreads=True),
    _fault(
        "embeddings near the end of float16",
        "E3",
        ("Llama", "GPT2", "Mixtral"),
        near_overflow,
        spreads=True,
        dtype=torch.float16,
    ),
    _fault("output 1 % too long", "E5", ALL, formula(altered_norms.one_per_cent_more)),
    _fault(
        "output 1 % too long past the 16th token", "E5", (*BATCHED, *BARE), formula(altered_norms.tail_off, on_stream)
    ),
    _fault("output lost past the 16th token", "E5", (*BATCHED, *BARE), formula(altered_norms.tail_lost, on_stream)),
    _fault(
        "float32 leaves where bfloat16 enters",
        "E6",
        PLAIN,
        formula(altered_norms.kept_wide),
        dtype=torch.bfloat16,
        autocast=True,
    ),
    _fault("query and key weights times 60", "F1", ("Llama", "GPT2", "Mixtral", *PLAIN, *BARE), large_logits),
    _fault("eight blocks without a norm", "F2", BARE, unnormalized, layers=8),
    _fault("the later half of eight blocks does nothing", "F3", ("Llama", "GPT2", "Qwen3", *BARE), idle, layers=8),
)
"""All faults of a model at rest, in the order of the catalogue."""
