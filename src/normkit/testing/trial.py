"""Trial: the norm in one dtype, with parameters of known values, and what it should give there."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit import reference
from normkit.spec import NormSpec
from normkit.testing import subject, truth
from normkit.testing.subject import Subject
from normkit.testing.truth import Truth

HALF = (torch.bfloat16, torch.float16)
_SEED = 0


@dataclass(kw_only=True, eq=False)
class Trial:
    """The norm in one dtype.

    Attributes:
        module: A copy.
        spec: What it is held against.
        dtype: Of inputs and parameters.
        shape: Of an input, the batch first.
        weight: The spec's weight on the CPU, or None.
        bias: Likewise.
        names: The parameters that these two are.
        device: Where the module is.
        generator: Source of inputs.
    """

    module: nn.Module
    spec: NormSpec
    dtype: torch.dtype
    shape: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    names: tuple[str | None, str | None]
    device: torch.device
    generator: torch.Generator

    @classmethod
    def of(cls, norm: Subject, spec: NormSpec, dtype: torch.dtype, parameter_dtype: torch.dtype | None = None) -> Trial:
        """A trial of a norm in a dtype, its parameters likewise or in one of their own."""
        generator = torch.Generator().manual_seed(_SEED)
        parameter_dtype = parameter_dtype or dtype
        values = norm.draw(spec.weight_offset, generator)
        names = (norm.weight_name, norm.bias_name)
        weight, bias = (None if name is None else values[name].to(parameter_dtype) for name in names)
        return cls(
            module=norm.copy(parameter_dtype, values),
            spec=spec,
            dtype=dtype,
            shape=norm.shape,
            weight=weight,
            bias=bias,
            names=names,
            device=norm.device,
            generator=generator,
        )

    @property
    def is_half(self) -> bool:
        """Inputs have 16 bits."""
        return self.dtype in HALF

    @property
    def stays_narrow(self) -> bool:
        """The spec itself computes in 16 bits here: every step rounds, in an order that no spec fixes."""
        return self.is_half and self.spec.statistics_dtype == "input"

    def normal(self, samples: int, *, mean: float = 0.0) -> Tensor:
        """Random samples about a mean, on the CPU."""
        return self.cast(torch.randn(samples, *self.shape[1:], generator=self.generator) + mean)

    def cast(self, x: Tensor) -> Tensor:
        """x in the trial's dtype."""
        return x.to(self.dtype)

    def y(self, x: Tensor) -> Tensor:
        """What the norm gives for x, which stays as it is; on the CPU.

        Raises:
            RefusedError: If it gives none.
        """
        with torch.no_grad():
            return subject.call(self.module, x.to(self.device, copy=True)).cpu()

    def gradients(self, x: Tensor, dy: Tensor, *, uses: int = 1) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Its gradients by x, weight and bias, on the CPU, the batch split among its uses; None where there is none.

        Raises:
            RefusedError: If it cannot be differentiated.
        """
        found = subject.gradients(self.module, x.to(self.device), dy.to(self.device), uses)
        by_x, by_weight, by_bias = (None if name is None else found[name] for name in ("", *self.names))
        return _kept(by_x), _kept(by_weight), _kept(by_bias)

    def parameters_of(self, spec: NormSpec) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias as far as the spec has them."""
        return self.weight if spec.has_weight else None, self.bias if spec.has_bias else None

    def truth(self, x: Tensor) -> Truth:
        """y as the spec's formula has it, nothing rounded."""
        return truth.output(x, self.spec, *self.parameters_of(self.spec))

    def program(self, x: Tensor) -> Tensor:
        """y as the spec's casts round it."""
        return reference.forward(x, self.spec, *self.parameters_of(self.spec))

    def expected(self, x: Tensor) -> Truth:
        """y as it should be in this dtype, with the size of its terms."""
        exact = self.truth(x)
        return Truth(self.program(x).double(), exact.size) if self.is_half else exact

    def samples(self, rows: int, elements: int) -> int:
        """How many samples hold about so many rows, and no more than so many elements."""
        return max(1, min(rows * self.row_length, elements) // math.prod(self.shape[1:]))

    @property
    def row_length(self) -> int:
        """Elements that share statistics."""
        return reference.to_rows(torch.empty(1, *self.shape[1:]), self.spec).shape[-1]

    @property
    def free_axes(self) -> int:
        """Leading axes along which neither statistics nor parameters lie."""
        if isinstance(self.spec.axes, str) or self.spec.axes == (1,):
            return 1
        taken = [part.dim() for part in (self.weight, self.bias) if part is not None]
        return len(self.shape) - max(len(self.spec.axes), *taken, 1)

    def felt(self) -> float:
        """The root mean square of rows that feel the spec's eps most; 0.0 if it has none."""
        eps = abs(reference.machine_eps(torch.empty(0, dtype=self.dtype), self.spec))
        size = eps**0.5 if self.spec.eps_placement == "inside" else eps
        return float(size / self.row_length**0.5) if self.spec.reduction == "sum" else size

    @property
    def words(self) -> str:
        """The dtype's name."""
        return str(self.dtype).removeprefix("torch.")


def _kept(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().cpu()
