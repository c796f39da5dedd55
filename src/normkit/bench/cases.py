"""The cases that are measured: an operation on rows of one shape and dtype, in one pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.errors import InputError
from normkit.spec import NormSpec
from normkit.specs import TORCH_LAYER_NORM, TORCH_RMS_NORM

OPS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PASSES = ("forward", "forward-out", "backward", "forward+backward")
SHAPES = ((1, 4096), (64, 4096), (512, 768), (2048, 4096), (16384, 128), (8192, 8192), (4, 262144))
QUICK_SHAPES = ((64, 4096), (512, 768))
# Of the public grids of quack and tritonbench, and batches of inference. Four cases a shape and pass, each compiled by
# every peer and timed for a second, are reckoned at six seconds each: six minutes. No run of it is recorded yet.
GPU_SHAPES = ((1, 4096), (128, 4096), (2048, 4096), (4096, 16384), (32768, 1024), (32768, 4096), (32768, 65536))
GPU_QUICK_SHAPES = ((128, 4096), (32768, 4096))
EPS = 1e-6
"""In units of x squared; the same for all."""

# Elements read and written, in copies (two elements each): forward reads x and writes y; backward reads dy and x and
# writes dx. With the addition, forward also reads the residual and writes the new one, and backward also reads its
# gradient.
_COPIES = {
    "forward": (1.0, 2.0),
    "forward-out": (1.0, 2.0),
    "backward": (1.5, 2.0),
    "forward+backward": (2.5, 4.0),
}


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    op: str
    """One of `OPS`."""
    shape: tuple[int, int]
    """Rows and features."""
    dtype: str
    """A name of `DTYPES`; all tensors have it."""
    direction: str
    """One of `PASSES`. "forward" returns a fresh y and keeps nothing for backward; "forward-out" writes into an
    existing y, as inference that reuses its memory does."""

    def __post_init__(self) -> None:
        """Refuse what is not measured."""
        for given, known in ((self.op, OPS), (self.dtype, tuple(DTYPES)), (self.direction, PASSES)):
            if given not in known:
                raise InputError(f"expected one of {', '.join(known)}, got {given!r}")
        if len(self.shape) != 2 or min(self.shape) < 1:
            raise InputError(f"a shape is a number of rows and of features, both at least 1, got {self.shape}")

    def __str__(self) -> str:
        """The case in words."""
        return f"{self.op} {self.direction} {self.dtype} {self.shape[0]}x{self.shape[1]}"

    @property
    def adds(self) -> bool:
        """Whether a residual is added first."""
        return self.op.startswith("add_")

    @property
    def is_differentiated(self) -> bool:
        """Whether it has a backward pass."""
        return self.direction.endswith("backward")

    @property
    def centres(self) -> bool:
        """Whether the norm is LayerNorm, with a bias."""
        return self.op.endswith("layer_norm")

    @property
    def spec(self) -> NormSpec:
        """The norm, as the reference computes it."""
        return (TORCH_LAYER_NORM if self.centres else TORCH_RMS_NORM).replace(eps=EPS)

    @property
    def answers(self) -> tuple[str, ...]:
        """Names of what is checked: the outputs, then the gradients of what it is differentiated by."""
        outputs = ("y", "new residual") if self.adds else ("y",)
        inputs = ("dx", "dresidual") if self.adds else ("dx",)
        parameters = ("dweight", "dbias") if self.centres else ("dweight",)
        return outputs + (inputs + parameters if self.is_differentiated else ())

    @property
    def outputs(self) -> int:
        """How many of the answers are outputs; they come first."""
        return 1 + self.adds

    @property
    def sheets(self) -> int:
        """How many of the answers have the shape of x; they come first."""
        return (1 + self.adds) * (1 + self.is_differentiated)

    @property
    def bytes(self) -> int:
        """The size of x in bytes."""
        return self.shape[0] * self.shape[1] * DTYPES[self.dtype].itemsize

    @property
    def copies(self) -> float:
        """How many copies of x move the bytes that must move."""
        return _COPIES[self.direction][self.adds]

    @property
    def moved_bytes(self) -> float:
        """The bytes that must be read and written; a copy of x reads it and writes it."""
        return 2 * self.copies * self.bytes


@dataclass(frozen=True, eq=False)
class Arguments:
    """The tensors of a case; leaves that want a gradient if its pass has one."""

    x: Tensor
    """A tensor of the case's shape."""
    residual: Tensor | None
    """A tensor of the case's shape; None if nothing is added."""
    weight: Tensor
    """Gain, shape (features,)."""
    bias: Tensor | None
    """Shape (features,); None for RMSNorm."""
    gradients: tuple[Tensor, ...]
    """Gradient of y, then of the new residual if there is one."""

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that are differentiated by."""
        return tuple(leaf for leaf in (self.x, self.residual, self.weight, self.bias) if leaf is not None)


def arguments(case: Case, device: str = "cpu") -> Arguments:
    """Random tensors for a case, from a fixed seed.

    They are drawn on the device, so the two kinds of device get other numbers: two billion take one core of a CPU half
    a minute, and would then have to be moved.
    """
    generator = torch.Generator(device).manual_seed(0)
    dtype, features = DTYPES[case.dtype], case.shape[1]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    def leaf(values: Tensor) -> Tensor:
        return values.requires_grad_(case.is_differentiated)

    return Arguments(
        x=leaf(normal(*case.shape)),
        residual=leaf(normal(*case.shape)) if case.adds else None,
        weight=leaf(1 + 0.1 * normal(features)),
        bias=leaf(0.1 * normal(features)) if case.centres else None,
        gradients=tuple(normal(*case.shape) for _ in range(1 + case.adds)),
    )


def grid(
    shapes: Iterable[tuple[int, int]], dtypes: Iterable[str], ops: Iterable[str], directions: Iterable[str]
) -> tuple[Case, ...]:
    """Every combination, ordered by operation, pass, dtype and shape."""
    return tuple(
        Case(op, shape, dtype, direction)
        for op, direction, dtype, shape in itertools.product(ops, directions, dtypes, shapes)
    )


def parse_shape(text: str) -> tuple[int, int]:
    """Rows and features from a text such as "64x4096".

    Raises:
        InputError: If it is no such text.

    Example:
        >>> parse_shape("64x4096")
        (64, 4096)
    """
    rows, _, features = text.partition("x")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in (rows, features)):
        raise InputError(f"a shape is rows x features, such as 64x4096, got {text!r}")
    return int(rows), int(features)
