"""Which modules of a model normkit can compute, from what the finder says of them; for the others, why not."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from normkit.conversion.replacement import Formula
from normkit.identification.behaviour import Examination
from normkit.identification.finder import Finder, forward_arguments, is_called_like_a_norm, likeness, may_be_norm
from normkit.identification.specimen import Specimen
from normkit.identification.state import undisturbed
from normkit.identification.tracing import ModuleCall

_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NO_NORMS = frozenset({"identity", "affine", "linear", "elementwise", "softmax", "not a norm"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A module that may be swapped; without a formula and a reason it is no norm."""

    shape: tuple[int, ...] = ()
    """Shape of an input that the module takes; () if none was found."""
    formula: Formula | None = None
    """The norm that would take its place."""
    reason: str | None = None
    """Why a module that normalizes cannot be swapped."""
    undecided: tuple[str, ...] = ()
    """Conventions that `examine` could not decide, each with the reason."""


class Search:
    """Looks at the modules of one model.

    Args:
        calls: Path -> the module's first call in a forward pass, where there was one.
    """

    def __init__(self, calls: Mapping[str, ModuleCall]) -> None:
        self._calls = calls
        self._finder = Finder()
        self._refused: dict[object, Candidate] = {}

    def find(self, module: nn.Module, paths: Sequence[str]) -> Candidate:
        """The candidate for a module, which is left as it is; modules alike that cannot be swapped are looked at once.

        Args:
            module: The module.
            paths: All its paths in the model.
        """
        if isinstance(module, nn.Sequential):
            # It computes nothing itself: the norm is the module inside it.
            return Candidate()
        call = next((self._calls[path] for path in paths if path in self._calls), None)
        if not (may_be_norm(module) if call is None else is_called_like_a_norm(call, module)):
            return Candidate()
        key = likeness(module), None if call is None else (call.input_shape[1:], call.tensors)
        if key in self._refused:
            return self._refused[key]
        if call is None:
            found = self._uncalled(module, paths[0])
        else:
            found = _candidate(module, self._finder.examined(module, paths[0], call.input_shape))
            if call.tensors > 1 and (found.formula is not None or found.reason is not None):
                found = Candidate(reason=f"it is called with {call.tensors} tensors: gated or adaptive")
        if found.formula is None:
            self._refused[key] = found
        return found

    def _uncalled(self, module: nn.Module, path: str) -> Candidate:
        found = [_candidate(module, seen) for seen in self._finder.uncalled(module, path)]
        formulas = [each for each in found if each.formula is not None]
        if not formulas:
            return next((each for each in found if each.reason is not None), Candidate())
        if any(each.formula != formulas[0].formula for each in found):
            return Candidate(reason="on inputs of two layouts it computes two things; give example inputs")
        further = [each.name for each in forward_arguments(module)[1:] if each.kind not in _ANY_NUMBER]
        if further:
            return Candidate(reason=f"its forward also takes {', '.join(further)}; give example inputs")
        return formulas[0]


def _candidate(module: nn.Module, seen: Examination | None) -> Candidate:
    if seen is None:
        return Candidate()
    passport, spec = seen.passport, seen.passport.spec
    if spec is None or "residual" in passport.readings:
        if passport.verdict in _NO_NORMS:
            return Candidate()
        kind = passport.readings.get("kind")
        lines = passport.evidence if kind is None else kind.evidence
        last = lines[-1] if lines else "no spec describes it"
        return Candidate(reason=last if passport.verdict == "norm" else f"{passport.verdict}: {last}")
    for label, has, name in (
        ("gain", spec.has_weight, passport.weight_name),
        ("bias", spec.has_bias, passport.bias_name),
    ):
        if has and name is None:
            return Candidate(reason=f"its {label} is fixed: no parameter of it acts as {label}")
    keeps_layout = False
    if spec.rows.are_places:
        with undisturbed():
            specimen = Specimen(module)
            keeps_layout = specimen(torch.ones(passport.shape, device=specimen.device)).is_contiguous()
    formula = Formula(
        spec,
        passport.weight_name,
        passport.bias_name,
        input=forward_arguments(module)[0].name,
        keeps_layout=keeps_layout,
    )
    undecided = tuple(f"{name}, {reason}" for name, reason in passport.undecidable.items())
    return Candidate(shape=passport.shape, formula=formula, undecided=undecided)
