"""Which modules of a model may be norms, and what each is: by behaviour, on an input that it takes.

Like modules are identified once. What that found is verified on each of them, number by number, when it is swapped.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from normkit.conversion.replacement import Formula
from normkit.errors import NormkitError, ShapeError
from normkit.identification.behaviour import Examination, examine
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.identification.state import undisturbed
from normkit.identification.tracing import ModuleCall

_PARAMETERS_PER_FEATURE = 4
"""A gain and a bias make two; anything with more than twice that is a block, a projection or an attention."""
_WIDEST = 2**20
_WIDEST_TABLE = 2**16
"""Features that a gain may have where no call shows how many there are; one that spans axes may be a matrix."""
_WEIGHTLESS = 64
_SPACES = ((5, 13), (13,), (2, 5, 13), ())
"""() last: in two dimensions the layouts are one, which says nothing of either."""
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NO_NORMS = frozenset({"identity", "affine", "linear", "elementwise", "softmax", "not a norm"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Finding:
    """What a module was found to be.

    Attributes:
        shape: Of an input it takes; () if none was found.
        formula: What would take its place, or None.
        reason: Why it cannot be swapped, for something that normalizes; None where there is a formula, or no norm.
        undecided: What `examine` could not decide about it.
        path: Where it was found.
    """

    shape: tuple[int, ...] = ()
    formula: Formula | None = None
    reason: str | None = None
    undecided: tuple[str, ...] = ()
    path: str = ""


class Search:
    """Finds out what modules are.

    Args:
        calls: Path -> the module's first call in a forward pass, where there was one.
    """

    def __init__(self, calls: Mapping[str, ModuleCall]) -> None:
        self._calls = calls
        self._known: dict[object, Finding] = {}

    def find(self, module: nn.Module, paths: Sequence[str], *, afresh: bool = False) -> Finding:
        """What a module is, from a like one if there was one and `afresh` is not asked for.

        Args:
            module: The module, which is left as it is.
            paths: Where it stands.
            afresh: Identify this very module.
        """
        call = next((self._calls[path] for path in paths if path in self._calls), None)
        if isinstance(module, nn.Sequential):
            # It does nothing of its own: the norm is what is in it.
            return Finding()
        if not (_may_be_norm(module) if call is None else _was_norm_like(call, module)):
            return Finding()
        key = _likeness(module), None if call is None else (call.input_shape[1:], call.tensors)
        if afresh or key not in self._known:
            found = _statically(module) if call is None else _called(module, call)
            self._known[key] = replace(found, path=paths[0])
        return self._known[key]


def _called(module: nn.Module, call: ModuleCall) -> Finding:
    """What a module is that was called."""
    found = _examined(module, call.input_shape)
    if call.tensors > 1 and (found.formula is not None or found.reason is not None):
        return Finding(reason=f"it is called with {call.tensors} tensors: gated or adaptive")
    return found


def _statically(module: nn.Module) -> Finding:
    """What a module is on the first input of each layout that it takes."""
    found: list[Finding] = []
    for layout in _layouts(module):
        shape = next((shape for shape in layout if not (found and len(shape) == 2) and _takes(module, shape)), None)
        if shape is not None:
            found.append(_examined(module, shape))
    formulas = [each for each in found if each.formula is not None]
    if not formulas:
        return next((each for each in found if each.reason is not None), Finding())
    if any(each.formula != formulas[0].formula for each in found):
        return Finding(reason="on inputs of two layouts it computes two things; give example inputs")
    further = [argument.name for argument in _arguments(module)[1:] if argument.kind not in _ANY_NUMBER]
    if further:
        return Finding(reason=f"its forward also takes {', '.join(further)}; give example inputs")
    return formulas[0]


def _examined(module: nn.Module, shape: tuple[int, ...]) -> Finding:
    """What a module is on an input of this shape."""
    try:
        seen = examine(module, _with_rows(shape))
    except (NormkitError, RuntimeError):
        # It takes no other input than the model's own, as no norm does.
        return Finding()
    return _finding(module, seen)


def _finding(module: nn.Module, seen: Examination) -> Finding:
    passport = seen.passport
    spec = passport.spec
    if spec is None or "residual" in passport.readings:
        if passport.verdict in _NO_NORMS:
            return Finding()
        kind = passport.readings.get("kind")
        lines = passport.evidence if kind is None else kind.evidence
        seen_last = lines[-1] if lines else "no spec describes it"
        return Finding(reason=seen_last if passport.verdict == "norm" else f"{passport.verdict}: {seen_last}")
    for label, has, name in (
        ("gain", spec.has_weight, passport.weight_name),
        ("bias", spec.has_bias, passport.bias_name),
    ):
        if has and name is None:
            return Finding(reason=f"its {label} is fixed: no parameter of it acts as {label}")
    formula = Formula(
        spec,
        passport.weight_name,
        passport.bias_name,
        input=_arguments(module)[0].name,
        keeps_layout=spec.axes == (1,) and _keeps_layout(module, seen.shape),
    )
    undecided = tuple(f"{name}, {reason}" for name, reason in passport.undecidable.items())
    return Finding(shape=seen.shape, formula=formula, undecided=undecided)


def _keeps_layout(module: nn.Module, shape: tuple[int, ...]) -> bool:
    with undisturbed():
        specimen = Specimen(module)
        return specimen(torch.ones(shape, device=specimen.device)).is_contiguous()


def _likeness(module: nn.Module) -> object:
    """What like modules share: classes, plain attributes and sizes, of the parts too."""
    return tuple(
        (
            type(part),
            tuple(sorted((name, repr(value)) for name, value in vars(part).items() if _is_plain(name, value))),
            tuple((name, value.shape) for name, value in part.named_parameters(recurse=False)),
            tuple((name, value.shape) for name, value in part.named_buffers(recurse=False)),
        )
        for part in module.modules()
    )


def _is_plain(name: str, value: object) -> bool:
    return name != "training" and isinstance(value, (bool, int, float, str, tuple, type(None)))


def _was_norm_like(call: ModuleCall, module: nn.Module) -> bool:
    if not call.bare or not call.input_shape or call.output_shape != call.input_shape:
        return False
    # A gain may have a row for each head, or span two axes.
    widest = max(math.prod(call.input_shape[1:]), call.input_shape[-1])
    return _size(module) <= _PARAMETERS_PER_FEATURE * widest


def _may_be_norm(module: nn.Module) -> bool:
    """Whether its parameters are few, and each is one number a feature or one number in all."""
    if type(module).forward is nn.Module.forward or not _arguments(module):
        return False
    parameters = list(module.parameters())
    largest = max((parameter.numel() for parameter in parameters), default=0)
    is_table = any(sum(size > 1 for size in parameter.shape) > 1 for parameter in parameters)
    return (
        len(parameters) <= _PARAMETERS_PER_FEATURE
        and largest <= (_WIDEST_TABLE if is_table else _WIDEST)
        and all(parameter.numel() in (1, largest) for parameter in parameters)
    )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _arguments(module: nn.Module) -> list[inspect.Parameter]:
    """The arguments of its forward."""
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def _layouts(module: nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """Inputs that a module with such numbers may take: with the features last, and with channels first."""
    features = list(_features(module))
    yield [(2, 3, *sizes) for sizes in features]
    yield [(2, *sizes, *space) for sizes in features if len(sizes) == 1 for space in _SPACES]


def _features(module: nn.Module) -> Iterator[tuple[int, ...]]:
    """How many features it may want: as its tensors have, or else as one of its attributes says, or any number."""
    tensors = [*module.parameters(), *module.buffers()]
    largest = max((tuple(size for size in tensor.shape if size > 1) for tensor in tensors), key=math.prod, default=())
    if largest:
        yield largest
        return
    for value in vars(module).values():
        sizes = value if isinstance(value, tuple) else (value,)
        if sizes and all(type(size) is int and 1 < size <= _WIDEST for size in sizes):
            yield sizes
    yield (_WEIGHTLESS,)


def _takes(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether it can be called so at all, or asks for more than one tensor, which `examine` looks into."""
    with undisturbed():
        try:
            specimen = Specimen(module)
            specimen(torch.ones(_with_rows(shape), device=specimen.device))
        except ShapeError:
            return False
        except UnrecognisedError as seen:
            return seen.verdict == "gated"
        except NormkitError:
            return False
    return True


def _with_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A call without rows, as for a modality that a batch lacks, still tells the features."""
    return tuple(max(size, 1) for size in (shape if len(shape) > 1 else (2, *shape)))
