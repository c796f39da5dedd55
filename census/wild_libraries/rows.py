"""One implementation of a norm: what it should be by a source of its own, what `nk.identify` finds, and the verdict."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import normkit as nk
from normkit.errors import NormkitError
from normkit.identification.passport import Passport
from normkit.identification.spec_readings import CONVENTIONS

SIZE = 64
MEAN = 1e4
LARGE_ERROR = 0.05
"""torch's LayerNorm has 2e-3; a variance from two large sums has lost all digits."""
AGREES = "agrees"
CHOICE = "differs by choice"
OWN_SOURCE = "differs from its own documentation or source model"
UNDECIDED = "undecided"
NOT_RUN = "not run here"
VERDICTS = (AGREES, CHOICE, OWN_SOURCE, UNDECIDED, NOT_RUN)

# The fields that a paper or a documentation states. It states no casts, so none are compared.
LAYER = {
    "centre_numerator": True,
    "centre_statistics": True,
    "correction": 0,
    "reduction": "mean",
    "axes": (-1,),
    "groups": 1,
    "eps": 1e-5,
    "eps_placement": "inside",
    "has_weight": True,
    "has_bias": True,
    "weight_offset": 0.0,
}
RMS = LAYER | {"centre_numerator": False, "centre_statistics": False, "has_bias": False, "eps": 1e-6}
IN_WORDS = {
    "centre_numerator": "mean subtracted",
    "centre_statistics": "variance about the mean",
    "correction": "taken from n in the divisor",
    "reduction": "squares as",
    "multiplier": "factor of the row",
    "eps_placement": "place of eps",
    "has_weight": "there is a gain",
    "has_bias": "there is a bias",
    "weight_offset": "added to the gain",
    "weight_placement": "the gain acts",
    "offset_dtype": "dtype in which the 1 is added",
    "cast": "rounding",
    "output_dtype": "dtype of the output",
    "groups": "groups",
    "axes": "axes of a row",
    "eps": "eps",
}
"""The words of the page before a value of a field."""
PLAIN = {"has_weight": False, "has_bias": False}
GROUP = LAYER | {"axes": "all_but_batch"}
L2 = RMS | PLAIN | {"eps": 1e-12, "eps_placement": "clamp", "reduction": "sum"}

LAYER_PAPER = "Ba et al. 2016, eq. 3"
RMS_PAPER = "Zhang and Sennrich 2019, eq. 4"
GROUP_PAPER = "Wu and He 2018, eq. 1 to 7"
BATCH_PAPER = "Ioffe and Szegedy 2015, algorithm 1"
INSTANCE_PAPER = "Ulyanov et al. 2016, eq. 3"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One implementation.

    Attributes:
        path: "module:Name" of the class or function; of a transcription "file:lines Name".
        variant: The setting that tells this row from others of the same path.
        make: From what `path` names to the norm that is asked: a module or a function of tensors.
        shape: Of an input.
        call: As for `nk.identify`.
        weight: A function's gain is given to it.
        bias: A function's bias is given to it.
        expected: The fields of NormSpec that the source states, or {"verdict": ...} for what no spec describes.
        source: Where the expectation was read: not the code that is run.
        differs: CHOICE, OWN_SOURCE or UNDECIDED for an implementation that is known to be another, and why.
        repository: Of a transcription, "owner/name@commit".
        library: Its name, where that is not the one of its module.
    """

    path: str
    source: str
    variant: str = ""
    make: Callable[[Any], Any] = lambda kind: kind(SIZE)
    shape: tuple[int, ...] = (2, 3, SIZE)
    call: Callable[..., Any] | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    expected: Mapping[str, Any] = field(default_factory=dict)
    differs: tuple[str, str] | None = None
    repository: str = ""
    library: str = ""


def drawn(module: nn.Module) -> nn.Module:
    """A module whose parameters are not their first values."""
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return module


def made(*arguments: Any, **named: Any) -> Callable[[Any], nn.Module]:
    """How a class is built with 64 channels and further arguments."""
    return lambda kind: drawn(kind(64, *arguments, **named))


def loose(package: str) -> None:
    """Let the files of a package be imported without the package's own imports, where these fail or fetch much."""
    outer, _, inner = package.partition(".")
    for name in (outer, package):
        if name not in sys.modules:
            found = find_spec(outer) if outer not in sys.modules else None
            if found is None and outer not in sys.modules:
                # The rows say that it is missing.
                return
            folder = sys.modules[outer].__path__[0] if found is None else str(Path(found.origin or "").parent)
            module = ModuleType(name)
            module.__path__ = [folder if name == outer else f"{folder}/{inner.replace('.', '/')}"]
            sys.modules[name] = module


def take(rows: Iterable[Row], packages: Mapping[str, str]) -> dict[str, Any]:
    """The answers for all rows of a group, with versions and seconds, as plain JSON.

    Args:
        rows: Of one group.
        packages: The name that is shown of each library, by the name of its module.
    """
    begun = time.perf_counter()
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        # A build for another torch: libraries that can do without it are told that it is missing.
        sys.modules["torchvision"] = None  # type: ignore[assignment]
    answers = []
    for row in rows:
        print(f"{row.path} {row.variant}", file=sys.stderr, flush=True)
        answers.append(answer(row, packages))
    libraries = dict.fromkeys((*packages.values(), "torch"))
    found = {name: version_of(name) for name in libraries}
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "versions": {name: number for name, number in found.items() if number},
        "seconds": round(time.perf_counter() - begun),
        "rows": answers,
    }


def version_of(package: str) -> str:
    """The installed version of a package without the name of its build, "" if it is missing."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return ""


def answer(row: Row, packages: Mapping[str, str]) -> dict[str, Any]:
    """The row of one implementation: the formula that was found, the one expected, and the verdict."""
    module, _, name = row.path.partition(" " if row.repository else ":")
    plain = {
        "library": row.library or packages[module.split(".")[0]],
        "name": name,
        "variant": row.variant,
        "origin": module,
        "how": "transcribed" if row.repository else "run",
        "repository": row.repository,
        "expected": expected_words(row.expected),
        "source": row.source,
        "found": "",
        "open": [],
        "far": "",
    }
    try:
        if row.repository:
            norm = row.make(None)
        else:
            target: Any = importlib.import_module(module)
            for part in name.split("."):
                target = getattr(target, part)
            plain["origin"] = origin(target, module)
            norm = row.make(target)
        passport = nk.identify(norm, row.shape, call=row.call, weight=row.weight, bias=row.bias)
    except Exception as error:  # whatever a library does that is missing here, or that this machine cannot run
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return plain | {"verdict": NOT_RUN, "remark": re.sub(r"(/[\w.+-]+){3,}/", ".../", reason)[:200]}
    verdict, remark = judged(row, passport)
    error = error_at_large_mean(row, norm, passport)
    lost = "its outputs are not finite" if math.isinf(error) else f"its largest error is {error:.1g}"
    return plain | {
        "found": found_words(passport),
        "open": sorted(set(passport.undecidable) & set(CONVENTIONS)),
        "verdict": verdict,
        "remark": remark,
        "far": lost if error > LARGE_ERROR else "",
    }


def error_at_large_mean(row: Row, norm: Any, passport: Passport) -> float:
    """Largest error of float32 outputs, whose size is about 3, on rows far from 0; 0 where the mean stays in them."""
    if passport.spec is None or not passport.spec.centre_numerator:
        return 0.0
    x = torch.randn(row.shape, generator=torch.Generator().manual_seed(0)) + MEAN
    given = [part for part in (row.weight, row.bias) if part is not None]
    try:
        with torch.no_grad():
            y = norm(x, *given) if row.call is None else row.call(norm, x, *given)
            right = passport(x.double(), *given)
        return float((y.double() - right).abs().nan_to_num(math.inf).max())
    except (NormkitError, RuntimeError):
        return 0.0


def origin(target: Any, module: str) -> str:
    """The file of a class or function below its package, and the line."""
    target = inspect.unwrap(target)
    try:
        path, line = Path(inspect.getsourcefile(target) or ""), inspect.getsourcelines(target)[1]
    except (TypeError, OSError):
        return module.replace(".", "/") + ".py"
    parts = path.parts
    start = max((place for place, part in enumerate(parts) if part == "site-packages"), default=-1) + 1
    return f"{'/'.join(parts[start:] if start else parts[-3:])}:{line}"


def found_words(passport: Passport) -> str:
    """The formula that was found, or the verdict and what acts beside the norm."""
    if passport.spec is not None:
        return f"`{passport.spec}`"
    beside = [passport.readings[name] for name in ("gate", "condition", "residual") if name in passport.readings]
    lines = [re.sub(r"(y = .*)", r"`\1`", line) for reading in beside for line in reading.evidence]
    return ": ".join([passport.verdict, *(["; ".join(lines)] if lines else [])])


def expected_words(expected: Mapping[str, Any]) -> str:
    """The formula that a source states, or the kind of map."""
    fields = {name: value for name, value in expected.items() if name != "verdict"}
    return f"`{nk.NormSpec(**fields)}`" if fields else expected.get("verdict", "norm")


def judged(row: Row, passport: Passport) -> tuple[str, str]:
    """The verdict and the remark. A difference that nobody has read is undecided, whatever it looks like."""
    differences, undecided = compared(row.expected, passport)
    if not differences:
        if undecided:
            return UNDECIDED, ". ".join([f"not decided: {', '.join(undecided)}", *(row.differs or ())[1:]])
        if row.differs is not None:
            return UNDECIDED, f"was read as: {row.differs[1]}; identify finds no difference"
        return AGREES, ""
    if row.differs is None:
        return UNDECIDED, "; ".join(differences)
    verdict, why = row.differs
    return verdict, f"{'; '.join(differences)}. {why}"


def compared(expected: Mapping[str, Any], passport: Passport) -> tuple[list[str], list[str]]:
    """Where a passport is not what a source states, and which stated fields were left open."""
    verdict = expected.get("verdict", "norm")
    fields = {name: value for name, value in expected.items() if name != "verdict"}
    if passport.verdict != verdict:
        return [f"{passport.verdict}, expected {verdict}"], []
    if not fields:
        return [], []
    if passport.spec is None:
        return ["a norm that no spec describes"], []
    undecided = {name for name in passport.undecidable if name in CONVENTIONS}
    open_fields = {each for name in undecided for each in CONVENTIONS[name]}
    differences = []
    for name, wanted in fields.items():
        found = getattr(passport.spec, name)
        near = isinstance(wanted, float) and isinstance(found, float) and math.isclose(wanted, found, rel_tol=1e-3)
        if name not in open_fields and not near and wanted != found:
            differences.append(f"{IN_WORDS.get(name, name)}: {shown(found)}, expected {shown(wanted)}")
    return differences, sorted(name for name in undecided if set(CONVENTIONS[name]) & fields.keys())


def shown(value: Any) -> str:
    """A value of a spec as the page writes it."""
    if value is None:  # only eps can be: the machine epsilon
        return "machine_eps"
    return format(value, "g") if isinstance(value, float) else str(value)
