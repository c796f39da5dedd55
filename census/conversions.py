"""The page on `normkit.convert` and the model families of transformers: docs/reference/conversions.md.

python census/conversions.py              write the page
python census/conversions.py --check      say whether the page is up to date
python census/conversions.py llama bert   print the rows of single families
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from configurations import Family, families, tiny_batch, tiny_model
from normkit.conversion.swapping import convert
from pages import settle

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "conversions.md"
# Relative errors: of the outputs and of all gradients together, and of a single parameter's gradient. Eight and 32
# times float32's machine epsilon; the original's own error, times so much, where that is larger.
TOGETHER, SINGLE = (2.0**-20, 1.5), (2.0**-18, 2.0)
# A gradient that is 0 but for rounding, such as that of a key's bias, is measured against the largest.
_SMALLEST = 1e-3

INCOMPARABLE = ("levit", "recurrent_gemma", "vit_mae")
"""The first two keep a part of one forward pass for the next, the last draws what it masks: no two runs are alike."""

INTRODUCTION = f"""\
# What conversion does to model families

`normkit.convert` on the tiny models of [the census](census.md) in transformers {{version}}: {{swapped}} of {{norms}}
norms of {{count}} families are swapped, all of them in {{whole}} families.

    python census/conversions.py           # writes this page
    python census/conversions.py --check   # says whether it is up to date

In every row the model was run before and after in float32, forward and backward, and held against float64, in which
no part of it was left in float32. The outputs, and the gradients of all parameters taken together, err by no more
than {TOGETHER[1]:g} times what they did before or {TOGETHER[0]:.0e} of their length, the gradient of any single
parameter by no more than {SINGLE[1]:g} times or {SINGLE[0]:.0e}. In bfloat16 and float16 `convert` itself compares
each norm bit for bit.

Not here: levit and recurrent_gemma keep a part of one forward pass for the next, vit_mae draws what it masks.

*Left alone*, by their class, are norms that are gated, adaptive, over a batch or not faster with normkit, and calls of
norm functions; `convert` names the reason for each.
"""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """One family, before and after.

    Attributes:
        family: Which.
        swapped: How many norms were swapped.
        left_alone: Class of a norm that was left alone -> how many.
        before: Relative error against float64 of "outputs", "gradients" and of each parameter's gradient by its name.
        after: The same of the converted model.
    """

    family: Family
    swapped: int
    left_alone: dict[str, int]
    before: dict[str, float]
    after: dict[str, float]

    @property
    def violations(self) -> dict[str, tuple[float, float]]:
        """What is further from float64 than the contract allows: its name -> error before and after."""
        return {
            name: (self.before[name], error)
            for name, error in self.after.items()
            if not error <= _allowed(name, self.before[name])
        }


def _allowed(name: str, before: float) -> float:
    floor, times = TOGETHER if name in ("outputs", "gradients") else SINGLE
    return max(floor, times * before)


def measure(family: Family) -> Conversion:
    """Run the tiny model, convert it, run it again, and compare both with float64."""
    model = _built(family)
    batch = tiny_batch(family, model)
    before = _run(model, batch)
    report = convert(model, batch)
    after = _run(model, batch)
    wide = {
        key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in batch.items()
    }
    reference = _built(family).double()
    with in_float64():
        truth = _run(reference, wide)
    return Conversion(
        family=family,
        swapped=report.counts["swapped"],
        left_alone=dict(sorted(Counter(norm.class_name for norm in report.left_alone).items())),
        before=_errors(before, truth),
        after=_errors(after, truth),
    )


@contextmanager
def in_float64() -> Iterator[None]:
    """What asks for float32, as most norms and softmaxes do, gets float64; and so does what asks for no dtype."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(default)


class _Widened(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        wide = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return function(*map(_widened, args), **wide)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _built(family: Family) -> Any:
    model = tiny_model(family)
    if hasattr(model, "set_experts_implementation"):
        # The fused ones know no float64.
        model.set_experts_implementation("eager")
    return model


def _run(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The outputs as one vector, and the gradients of a random function of them by the parameters' names."""
    torch.manual_seed(0)
    output = torch.cat([value.flatten() for value in _tensors(model(**batch).values())])
    # Drawn by numpy: the numbers are the same in every dtype.
    direction = torch.as_tensor(np.random.default_rng(0).standard_normal(len(output))).to(output)
    model.zero_grad()
    (output * direction).sum().backward()
    gradients = {name: value.grad.double() for name, value in model.named_parameters() if value.grad is not None}
    return {"outputs": output.detach().double(), **gradients}


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """The floating-point tensors of a model's output, those in tuples too."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _errors(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    gradients = [name for name in truth if name != "outputs"]
    smallest = _SMALLEST * max(float(truth[name].norm()) for name in gradients)
    errors = {name: float((found[name] - truth[name]).norm() / max(truth[name].norm(), smallest)) for name in gradients}
    together = [torch.cat([each[name].flatten() for name in gradients]) for each in (found, truth)]
    outputs = found["outputs"], truth["outputs"]
    return {"outputs": _relative(*outputs), "gradients": _relative(*together), **errors}


def _relative(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def convertible() -> tuple[Family, ...]:
    """The families that are converted, by name."""
    return tuple(family for family in families() if family.name not in INCOMPARABLE)


def take(names: Sequence[str] = ()) -> tuple[Conversion, ...]:
    """Convert the families of these names, or all."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings(action="ignore"):
        return tuple(measure(family) for family in convertible() if not names or family.name in names)


def page(taken: Sequence[Conversion]) -> str:
    """The whole page in Markdown.

    Raises:
        ValueError: If a family is outside the contract.
    """
    outside = {each.family.name: each.violations for each in taken if each.violations}
    if outside:
        raise ValueError(f"outside the contract: {outside}")
    swapped, left = sum(each.swapped for each in taken), sum(sum(each.left_alone.values()) for each in taken)
    whole = sum(each.swapped > 0 and not each.left_alone for each in taken)
    head = INTRODUCTION.format(
        version=transformers.__version__, swapped=swapped, norms=swapped + left, count=len(taken), whole=whole
    )
    return "\n".join([head, _HEADER, *map(row, taken)]) + "\n"


_HEADER = "| family | swapped | left alone |\n|---|---:|---|"


def row(taken: Conversion) -> str:
    """One family's row in Markdown."""
    norms = taken.swapped + sum(taken.left_alone.values())
    left = ", ".join(f"{count} {name}" for name, count in taken.left_alone.items())
    return f"| {taken.family.name} | {taken.swapped} of {norms} | {left} |"


def main() -> None:
    """Write the page, check it, or print rows."""
    arguments = sys.argv[1:]
    if arguments and arguments != ["--check"]:
        for taken in take(arguments):
            print(row(taken), *taken.violations.items())
        return
    settle(PAGE, page(take()), check=bool(arguments))


if __name__ == "__main__":
    main()
