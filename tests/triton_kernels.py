"""The Triton kernels behind the public functions: on a GPU, or on the CPU in Triton's interpreter.

Without a GPU the operators of tensors on the CPU are those of `normkit.kernels.triton.operators` while a test runs, and
what chooses an implementation is told what it would be told of a GPU. The interpreter itself is mended: it rounds to
bfloat16 and fuses multiplication and addition as a GPU does, and it patches Triton's language once instead of at every
call, which takes longer than the kernels do.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from contract import Case
from normkit.kernels.triton import loading
from normkit.kernels.triton.configuration import Tiling
from normkit.ops import calls

HAS_GPU = torch.cuda.is_available()
if HAS_GPU:
    # Read when the kernels are first wanted.
    os.environ.setdefault("NORMKIT_CUDA", "on")
DEVICE = "cuda" if HAS_GPU else "cpu"
OPERATORS = (
    "normalize_rows",
    "normalize_rows_out",
    "normalize_forward",
    "add_normalize_forward",
    "add_normalize_rows_out",
    "normalize_backward",
)


def on_gpu_only(*values: Any) -> Any:
    """A set of parameters that the interpreter would take too long for."""
    return pytest.param(*values, marks=pytest.mark.gpu)


def moved(case: Case) -> Case:
    """A case where the kernels compute."""
    return Case(*(None if tensor is None else tensor.to(DEVICE) for tensor in case))


def to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16 numbers, ties to even."""
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.bfloat16).view(torch.uint16).numpy()


def to_float32(bits: np.ndarray) -> np.ndarray:
    """The numbers that bits of bfloat16 are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@contextlib.contextmanager
def rounding_interpreter() -> Iterator[None]:
    """Have Triton's interpreter convert to and from bfloat16, and multiply and add at once, as a GPU does."""
    from triton import language
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    plain_cast, plain_convert, plain_fma = builder.cast_impl, builder.create_fp_to_fp, builder.create_fma

    def converted(source: Any, target: Any, otherwise: Any) -> Any:
        kind, other = source.dtype.scalar, target.scalar
        floats = language.float16, language.float32, language.float64
        if other == language.bfloat16 and kind in floats:
            return interpreter.TensorHandle(to_bfloat16(source.data), other)
        if kind == language.bfloat16 and other in floats:
            return interpreter.TensorHandle(to_float32(source.data).astype(interpreter._get_np_dtype(other)), other)
        return otherwise()

    def cast(self: Any, source: Any, target: Any) -> Any:
        return converted(source, target, lambda: plain_cast(self, source, target))

    def convert(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        return converted(source, target, lambda: plain_convert(self, source, target, rounding))

    def fused(_self: Any, a: Any, b: Any, c: Any) -> Any:
        exact = a.data.astype(np.float64) * b.data + c.data
        return interpreter.TensorHandle(exact.astype(a.data.dtype), a.dtype.scalar)

    builder.cast_impl, builder.create_fp_to_fp, builder.create_fma = cast, convert, fused
    try:
        yield
    finally:
        builder.cast_impl, builder.create_fp_to_fp, builder.create_fma = plain_cast, plain_convert, plain_fma


class _Nothing:
    """What is left to undo of a language that stays patched."""

    def restore(self) -> None:
        pass


@contextlib.contextmanager
def patched_language() -> Iterator[None]:
    """Have Triton's language patched for the interpreter, once for all calls inside, and no tensor copied."""
    from triton import language
    from triton.runtime import interpreter

    executor, patch = interpreter.GridExecutor, interpreter._patch_lang
    to_host, to_device = executor._init_args_hst, executor._restore_args_dev
    # It goes by the modules that a kernel sees.
    scope = patch(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda _function: _Nothing()
    # All are on the CPU. Copied onto themselves, tensors with wide gaps would take the memory that they only reserve.
    executor._init_args_hst = lambda _self, tensors, keywords: (list(tensors), dict(keywords))
    executor._restore_args_dev = lambda *_: None
    try:
        yield
    finally:
        executor._init_args_hst, executor._restore_args_dev = to_host, to_device
        interpreter._patch_lang = patch
        scope.restore()


@contextlib.contextmanager
def routed_to_triton() -> Iterator[None]:
    """Have the operators of tensors on the CPU, and what chooses them, be those of a GPU."""
    from normkit.kernels.triton import operators

    def supports(plan: Any, x: Tensor, *others: Tensor | None) -> bool:
        return loading.supports_tensors(plan.spec, x, *others) is None

    kept = calls._has_kernels, calls._kernels_missing
    library = torch.library.Library("normkit", "IMPL")
    with warnings.catch_warnings():
        # Torch warns, once, of what is wanted here: the compiled implementations stand back while these are there.
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        for name in OPERATORS:
            library.impl(name, getattr(operators, name), "CPU", allow_override=True)
    calls._has_kernels, calls._kernels_missing = supports, None
    operators._plans.clear()
    try:
        yield
    finally:
        calls._has_kernels, calls._kernels_missing = kept
        operators._plans.clear()
        library._destroy()


@contextlib.contextmanager
def triton_kernels() -> Iterator[None]:
    """The Triton kernels compute norms of tensors on `DEVICE` inside."""
    if HAS_GPU:
        yield
        return
    with (
        rounding_interpreter(),
        patched_language(),
        routed_to_triton(),
        np.errstate(all="ignore"),
        warnings.catch_warnings(),
    ):
        # The largest of a row of NaN, as numpy finds it.
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
        yield


def cut_into(monkeypatch: pytest.MonkeyPatch, tiling: Tiling, row_sums: int = 64) -> None:
    """Have rows of any length cut as those of another would be, so that short ones take the way of long ones."""
    from normkit.kernels.triton import operators, planning

    plain = planning._row_sums

    def sums_in_pieces(*arguments: Any) -> Any:
        launch = plain(*arguments)
        return launch._replace(constants={**launch.constants, "BLOCK_N": row_sums})

    monkeypatch.setattr(planning, "forward_tiling", lambda *_: tiling)
    monkeypatch.setattr(planning, "backward_tiling", lambda *_, **__: tiling)
    monkeypatch.setattr(planning, "_row_sums", sums_in_pieces)
    operators._plans.clear()
