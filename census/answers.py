"""One norm class: built, identified, and judged by what its source says."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

import normkit as nk
from definitions import Definition
from normkit.errors import NormkitError
from normkit.identification.passport import Passport
from normkit.identification.spec_readings import CONVENTIONS

Outcome = Literal["right", "not plain", "undecidable", "wrong", "failed"]
Call = Callable[[nn.Module, Tensor], Tensor]

_SIZE = 64
_BITS = 0.99
"""In a few hundred elements; float32 in place of float64 flips up to 0.5 %, a wrong cast 4 % or more."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What `identify` said of a class in one of its variants.

    Attributes:
        definition: The class.
        case: The expectation, as in expected.toml.
        outcome: "right"; "not plain" if it is rightly named something else than a norm that a spec describes;
            "undecidable" if what was decided is right and something was not; "wrong"; or "failed", without an answer.
        found: The formula of its spec, or its verdict and what was seen of a second input.
        verdict: The verdict of its passport.
        remark: What could not be decided and why, or what is wrong.
    """

    definition: Definition
    case: Mapping[str, Any]
    outcome: Outcome
    remark: str
    found: str = ""
    verdict: str = ""


def ask(definition: Definition, case: Mapping[str, Any]) -> Answer:
    """Identify a class in one variant, and judge the answer."""
    norm, call = build(definition, case), call_of(case)
    try:
        passport = nk.identify(norm, tuple(case["shape"]), call=call if "call" in case else None)
    except NormkitError as error:
        return Answer(definition=definition, case=case, outcome="failed", remark=str(error))
    outcome, remark = judge(passport, case)
    if outcome in ("right", "undecidable") and passport.spec is not None and not computes(passport, norm, call, case):
        outcome, remark = "wrong", "called, its passport does not give its outputs"
    return Answer(
        definition=definition,
        case=case,
        outcome=outcome,
        remark=remark,
        found=_in_words(passport),
        verdict=passport.verdict,
    )


def _in_words(passport: Passport) -> str:
    """The formula, or the verdict and how a second input acts."""
    if passport.spec is not None:
        return f"`{passport.spec}`"
    second = [passport.readings[name] for name in ("gate", "condition") if name in passport.readings]
    lines = (re.sub(r"(y = .*)", r"`\1`", line) for reading in second for line in reading.evidence)
    return ": ".join([passport.verdict, *(["; ".join(lines)] if second else [])])


def build(definition: Definition, case: Mapping[str, Any]) -> nn.Module:
    """The class with the arguments of a case, its parameters and buffers from 0.5 to 1.5."""
    made = getattr(importlib.import_module(definition.module), definition.name)
    given = dict(case.get("arguments", {}))
    for name, parameter in inspect.signature(made).parameters.items():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if name == "config":
            stated = "config_class" in case
            config = getattr(transformers, case["config_class"]) if stated else parameter.annotation
            given[name] = config(**case.get("config", {}))
        elif is_named and parameter.default is parameter.empty:
            given.setdefault(name, _SIZE)
    norm = made(**given)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*norm.parameters(), *norm.buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5, generator=generator)
    return norm


def call_of(case: Mapping[str, Any]) -> Call:
    """How a norm is called with x alone."""
    return eval(f"lambda norm, x: {case.get('call', 'norm(x)')}", {"torch": torch})


def computes(passport: Passport, norm: nn.Module, call: Call, case: Mapping[str, Any]) -> bool:
    """Whether the passport, called, gives what the norm gives, in bfloat16 bit for bit."""
    x = torch.randn(4, *case["shape"][1:], generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = passport(x), call(norm, x)
        if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
            return False
        # What never leaves 16 bits rounds at each step: the spec says so, and not in which order the steps are.
        if "casts" in passport.undecidable or passport.spec.statistics_dtype == "input":
            return True
        x = x.bfloat16()
        weight, bias = (None if part is None else part.bfloat16() for part in (passport.weight, passport.bias))
        try:
            found, expected = passport(x, weight, bias), call(copy.deepcopy(norm).bfloat16(), x)
        except RuntimeError:  # parameters that must stay in float32
            found, expected = passport(x), call(norm, x)
    return found.dtype == expected.dtype and float((found == expected).double().mean()) >= _BITS


def judge(passport: Passport, case: Mapping[str, Any]) -> tuple[Outcome, str]:
    """Hold a passport against what the source says; only what was decided can be wrong."""
    verdict, fields = case.get("verdict", "norm"), case.get("spec")
    if passport.verdict == "undecidable":
        return "undecidable", _reasons(passport.undecidable)
    if passport.verdict != verdict:
        return "wrong", f"said to be {passport.verdict}, is {verdict}"
    differ = []
    for name, expected in case.get("readings", {}).items():
        differ += _differences(name, expected, passport.readings[name].value if name in passport.readings else None)
    if fields is None:
        differ += [] if passport.spec is None else [f"no spec describes it, found {passport.spec}"]
        return ("wrong", "; ".join(differ)) if differ else ("not plain", "")
    if passport.spec is None:
        return "wrong", "said to be described by no spec"
    undecided = {name: why for name, why in passport.undecidable.items() if name in CONVENTIONS}
    open_fields = {field for name in undecided for field in CONVENTIONS[name]}
    found = {name: value for name, value in passport.spec.to_json().items() if name not in open_fields}
    differ += _differences("spec", {"spec": fields}, {"spec": found})
    if differ:
        return "wrong", "; ".join(differ)
    return ("undecidable", _reasons(undecided)) if undecided else ("right", "")


def _differences(name: str, expected: Any, found: Any) -> list[str]:
    """Where a reading is not what was expected; of a spec the fields that were decided are compared."""
    if not isinstance(expected, dict) or not isinstance(found, dict):
        return [] if expected == found else [f"{name} is {expected}, found {found}"]
    differ = []
    for key, value in expected.items():
        if key == "spec" and isinstance(found.get(key), dict):
            spec = nk.NormSpec.from_json(value).to_json()
            pairs = [(field, spec[field], decided) for field, decided in found[key].items()]
        else:
            pairs = [(f"{name}.{key}", value, found.get(key))]
        differ += [f"{field} is {wanted}, found {got}" for field, wanted, got in pairs if wanted != got]
    return differ


def _reasons(undecided: Mapping[str, str]) -> str:
    """Readings and reasons, without the rates, which depend on the processor."""
    return "; ".join(f"{name}: {re.sub(r'[;,] the nearest.*', '', why)}" for name, why in undecided.items())
