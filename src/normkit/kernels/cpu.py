"""The compiled CPU kernels: found, loaded once, and which norms they can compute.

setup.py builds csrc/ to one library next to this file. Loading it registers its implementations with torch. Results do
not depend on it: where the kernels are not built, are switched off, or cannot compute a norm, the reason is one line
and the reference computes.

The environment variable NORMKIT_CPU chooses the instruction set; it is read when the kernels are first used:

    auto      the best set of this CPU (default)
    avx512    AVX-512 (F, BW, VL, DQ)
    avx2      AVX2, FMA and F16C
    portable  what the compiler makes for every CPU
    off       no kernels: plain torch
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from normkit.errors import InputError
from normkit.kernels import signatures
from normkit.spec import NormSpec

# In the order of their numbers in the library.
_NAMES = ("auto", "portable", "avx2", "avx512")
_HALF = (torch.float16, torch.bfloat16)
_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CLASSES = (Tensor, Parameter)

# (from, to): the dtypes that are normalized and written, and the reverse for gradients.
_PAIRS = frozenset(
    [(dtype, dtype) for dtype in _FLOATING]
    + [(torch.float32, half) for half in _HALF]
    + [(half, torch.float32) for half in _HALF]
)

_is_tried = False
_library: ctypes.CDLL | None = None
_reason: str | None = None


def choice() -> str:
    """The value of NORMKIT_CPU.

    Raises:
        InputError: If it is none of the words above.
    """
    given = os.environ.get("NORMKIT_CPU", "auto")
    if given not in (*_NAMES, "off"):
        raise InputError(f"NORMKIT_CPU must be auto, avx512, avx2, portable or off, got {given!r}")
    return given


def library() -> Path | None:
    """The built library, or None."""
    folder = Path(__file__).parent
    return next((path for path in sorted(folder.glob("_cpu.*")) if path.suffix == ".so"), None)


def load() -> str | None:
    """Load the kernels, on the first call.

    Returns:
        None if torch now has the kernels; otherwise the reason, on one line.

    Raises:
        InputError: If NORMKIT_CPU is unknown.
    """
    global _is_tried, _library, _reason
    if not _is_tried:
        _library, _reason = _open()
        _is_tried = True
    return _reason


def _open() -> tuple[ctypes.CDLL | None, str | None]:
    wanted = choice()
    if wanted == "off":
        return None, "NORMKIT_CPU=off"
    path = library()
    if path is None:
        return None, "not built; install a C++ compiler and torch, then reinstall normkit with --no-build-isolation"
    try:
        # Its initializers register the implementations with torch, which is loaded already.
        loaded = ctypes.CDLL(str(path))
        if not _is_of_these_sources(loaded):
            return None, f"{path.name} was built from other sources than the Python files; reinstall normkit"
        used = _use(loaded, _NAMES.index(wanted))
    except (OSError, AttributeError) as error:
        return None, f"{path.name} does not fit this torch; reinstall normkit: {error}"
    if used is None:
        return None, f"NORMKIT_CPU={wanted}, which this CPU does not have"
    return loaded, None


def _is_of_these_sources(loaded: ctypes.CDLL) -> bool:
    """Whether the library implements the operators of signatures.py; an old one that states no version does not."""
    if hasattr(loaded, "normkit_select_instructions") and not hasattr(loaded, "normkit_signatures_version"):
        return False
    return int(loaded.normkit_signatures_version()) == signatures.version()


def _use(loaded: ctypes.CDLL, number: int) -> str | None:
    """Make the library use an instruction set (-1: no change); returns the one in use, None if this CPU lacks it."""
    function = loaded.normkit_select_instructions
    function.argtypes, function.restype = [ctypes.c_int32], ctypes.c_int32
    used = function(number)
    return _NAMES[used] if used else None


def instructions() -> str:
    """The instruction set in use: "avx512", "avx2" or "portable".

    Raises:
        InputError: If the kernels are not in use.
    """
    return str(_use(handle(), -1))


def select(name: str) -> None:
    """Change the instruction set of the loaded kernels, whatever NORMKIT_CPU says: for tests and measurements.

    Args:
        name: "auto", "avx512", "avx2" or "portable".

    Raises:
        InputError: If there is no such set, this CPU lacks it, or the kernels are not in use.
    """
    if name not in _NAMES:
        raise InputError(f"the instruction set must be auto, avx512, avx2 or portable, got {name!r}")
    if _use(handle(), _NAMES.index(name)) is None:
        raise InputError(f"this CPU does not have {name}; the kernels go on with {instructions()}")


def handle() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        InputError: If the kernels are not in use.
    """
    reason = load()
    if _library is None:
        raise InputError(f"the C++ kernels are not in use: {reason}")
    return _library


def supports(
    spec: NormSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None
) -> str | None:
    """Why the kernels cannot compute this norm of these tensors; None if they can.

    Args:
        spec: The conventions.
        x: Input of shape (..., n), of any strides.
        weight: Gain, or None.
        bias: Bias, or None.
        residual: Added to x before the norm, or None.
    """
    return signatures.supports_spec(spec) or supports_tensors(spec, x, weight, bias, residual)


def supports_tensors(
    spec: NormSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None
) -> str | None:
    """The part of `supports` that depends on the tensors, for a spec that is supported."""
    rows = x if residual is None else residual
    for label, tensor in (("tensors", x), ("tensors", rows), ("parameters", weight), ("parameters", bias)):
        if tensor is None:
            continue
        if not tensor.is_cpu:
            return f"{label} on {tensor.device.type}"
        if type(tensor) not in _CLASSES:
            return f"{label} of class {type(tensor).__name__}"
        if tensor.dtype not in _FLOATING:
            return f"{tensor.dtype}"
    return _supports_dtypes(spec, x, rows, weight, bias) or signatures.supports_sizes(len(spec.axes), x, weight, bias)


def _supports_dtypes(spec: NormSpec, x: Tensor, rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> str | None:
    if rows.dtype in _HALF and spec.statistics_dtype == "input":
        return "statistics in 16 bits"
    # The kernels hold gain and bias in the precision in which they compute.
    has_wide = any(tensor is not None and tensor.dtype is torch.float64 for tensor in (weight, bias))
    if has_wide and rows.dtype is not torch.float64:
        return "float64 parameters of a narrower input"
    if (x.dtype, rows.dtype) not in _PAIRS:
        return f"{x.dtype} added to {rows.dtype}"
    y = spec.casts.output_dtype(x.dtype, weight, bias)
    return None if (rows.dtype, y) in _PAIRS else f"{y} from {rows.dtype} rows"
