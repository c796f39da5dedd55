"""One recorded forward pass: module calls, and the norms and attentions called as functions.

Only shapes, dtypes and parameters are kept, never an activation. The hooks and the mode are
gone when `trace` returns or raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normkit.identification.sharding import part_of
from normkit.identification.state import hooked

NORM_FUNCTIONS: dict[object, str] = {
    F.layer_norm: "layer_norm",
    F.rms_norm: "rms_norm",
    F.group_norm: "group_norm",
    # They may be called directly, and a compiler sees through `F.rms_norm` to the function that it calls.
    torch.layer_norm: "layer_norm",
    torch.rms_norm: "rms_norm",
    torch.group_norm: "group_norm",
}
ATTENTION_FUNCTIONS: dict[object, str] = {
    F.scaled_dot_product_attention: "sdpa",
    F.softmax: "softmax",
    torch.softmax: "softmax",
    Tensor.softmax: "softmax",
}
_ADDITIONS = {torch.add, Tensor.add, Tensor.add_}


@dataclass(frozen=True, eq=False, kw_only=True)
class ModuleCall:
    """One call of a module whose first tensor argument and output are floating-point tensors."""

    path: str
    """Path of the module; "" for the model itself."""
    module: nn.Module
    order: int
    """Position among all calls, by their start."""
    input_shape: tuple[int, ...]
    """Shape of the first floating-point tensor argument."""
    input_dtype: torch.dtype
    output_shape: tuple[int, ...]
    """Shape of the output; of a tuple, as `first_output` takes it."""
    output_dtype: torch.dtype
    tensors: int
    """Number of floating-point tensor arguments."""
    bare: bool
    """The output is a tensor and not a tuple."""
    adds: bool = False
    """Its own code adds something to the first tensor argument, as a residual connection does."""
    part: tuple[int, int] = (0, 1)
    """For a module with a split parameter: the number of this process's part, and the number of parts."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FunctionCall:
    """One call of a norm or an attention function."""

    parent: str
    """Path of the innermost module that was running."""
    function: str
    """One of "layer_norm", "rms_norm", "group_norm", "sdpa" and "softmax"."""
    ordinal: int
    """Number of earlier calls of the same function in that run of the parent."""
    order: int
    """Position among all calls."""
    input_shape: tuple[int, ...]
    """Shape of the first floating-point tensor argument."""
    input_dtype: torch.dtype
    arguments: Mapping[str, Any]
    """The arguments that are not activations, by name: a norm's normalized_shape, weight, bias, eps."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Trace:
    """Everything that was called, in order of the calls' start."""

    modules: tuple[ModuleCall, ...]
    functions: tuple[FunctionCall, ...]


def trace(model: nn.Module, run: Callable[[], object]) -> Trace:
    """Run the model once and record which modules and functions are called.

    Args:
        model: The model; it is left as it was, also if `run` raises.
        run: Calls the model on a small input.
    """
    recorder = _Recorder()
    with torch.no_grad(), _hooked(model, recorder), recorder:
        run()
    return Trace(
        modules=tuple(sorted(recorder.modules, key=lambda call: call.order)), functions=tuple(recorder.functions)
    )


def first_tensor(args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor | None:
    """The first floating-point tensor among the arguments of a call."""
    return next(floating_tensors((*args, *kwargs.values())), None)


def first_output(output: object, given: Sequence[object] = ()) -> Tensor | None:
    """The output of a call with these arguments; of a tuple or a list its first floating-point tensor.

    Blocks of joint attention take the image's stream before the text's and return the text's first: an output that has
    the shape of another argument than the first gives way to one that has the first's.
    """
    found = [*floating_tensors(output if isinstance(output, (tuple, list)) else (output,))]
    entered = [tensor.shape for tensor in floating_tensors(given)]
    if found and found[0].shape in entered[1:]:
        return next((tensor for tensor in found if tensor.shape == entered[0]), found[0])
    return next(iter(found), None)


def members(output: object) -> tuple[object, ...]:
    """The members of a model's output, one level deep: of a tuple, of a list, or of a mapping as transformers has."""
    if isinstance(output, Mapping):
        return tuple(output.values())
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)


def floating_tensors(values: Sequence[object]) -> Iterator[Tensor]:
    """The floating-point tensors among values."""
    return (value for value in values if isinstance(value, Tensor) and value.is_floating_point())


@dataclass
class _Frame:
    """A module call that has not returned."""

    path: str
    order: int
    made: Counter[str]
    part: tuple[int, int] = (0, 1)
    entered: Tensor | None = None
    adds: bool = False


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.modules: list[ModuleCall] = []
        self.functions: list[FunctionCall] = []
        self.stack: list[_Frame] = [_Frame("", -1, Counter())]
        self.order = 0

    def next_order(self) -> int:
        self.order += 1
        return self.order - 1

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = NORM_FUNCTIONS.get(function) or ATTENTION_FUNCTIONS.get(function)
        if name is not None and (x := first_tensor(args, kwargs)) is not None:
            frame = self.stack[-1]
            self.functions.append(
                FunctionCall(
                    parent=frame.path,
                    function=name,
                    ordinal=frame.made[name],
                    order=self.next_order(),
                    input_shape=tuple(x.shape),
                    input_dtype=x.dtype,
                    arguments=norm_arguments(name, args, kwargs),
                )
            )
            frame.made[name] += 1
        elif function in _ADDITIONS and (entered := self.stack[-1].entered) is not None:
            self.stack[-1].adds |= any(value is entered for value in args)
        return function(*args, **kwargs)


_PARAMETERS = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
}


def norm_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a norm function by name, without the input."""
    given = dict(zip(_PARAMETERS.get(name, ()), args, strict=False)) | dict(kwargs)
    return {key: value for key, value in given.items() if key in _PARAMETERS.get(name, ()) and key != "input"}


@contextmanager
def _hooked(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    paths = {module: path for path, module in model.named_modules()}

    def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if module in paths:
            frame = _Frame(paths[module], recorder.next_order(), Counter(), part_of(module), first_tensor(args, kwargs))
            recorder.stack.append(frame)

    def after(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        if module not in paths:
            return
        # A call that raised never came here: its frame, and any below it, are dropped.
        while (frame := recorder.stack.pop()).path != paths[module]:
            continue
        x = first_tensor(args, kwargs)
        y = first_output(output, (*args, *kwargs.values()))
        if x is not None and y is not None:
            recorder.modules.append(
                ModuleCall(
                    path=frame.path,
                    module=module,
                    order=frame.order,
                    input_shape=tuple(x.shape),
                    input_dtype=x.dtype,
                    output_shape=tuple(y.shape),
                    output_dtype=y.dtype,
                    tensors=sum(1 for _ in floating_tensors((*args, *kwargs.values()))),
                    bare=isinstance(output, Tensor),
                    adds=frame.adds,
                    part=frame.part,
                )
            )

    begins = (module.register_forward_pre_hook(before, with_kwargs=True) for module in paths)
    ends = (module.register_forward_hook(after, with_kwargs=True) for module in paths)
    with hooked([*begins, *ends]):
        yield
