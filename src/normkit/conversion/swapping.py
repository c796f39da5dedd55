"""`convert` and `revert`: find the norms of a model, verify, swap; and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.conversion.candidates import Search
from normkit.conversion.replacement import Formula, is_converted, is_normkit, is_torchs, restore, swap
from normkit.conversion.result import Check, ConversionReport, LeftAlone, SwappedNorm
from normkit.conversion.verification import floating_dtypes, settings, verify
from normkit.errors import KindError, ModelError, UseError
from normkit.identification.sharding import is_distributed
from normkit.identification.sites import is_within
from normkit.identification.state import in_mode
from normkit.identification.tracing import NORM_FUNCTIONS, Trace, trace
from normkit.kernels import cpu
from normkit.text import first_line

Progress = Callable[[str, int, int], None]


def convert(model: nn.Module, inputs: object = None, *, progress: Progress | None = None) -> ConversionReport:
    """Have every norm of a model computed by normkit, each verified first.

    Norms are found by what they compute, never by their class. Before a swap, normkit's output and gradients are
    compared with the original's on a copy, in each dtype that the norm may run in: a norm that fails stays as it is,
    and so do norms that the kernels do not compute (where there are no kernels at all, plain torch takes all of them),
    gated, adaptive and batch norms, and calls of norm functions; the report says why.

    A module stays the object that it is: its class changes, to `normkit.LayerNorm` and `normkit.RMSNorm` for torch's,
    for others to a class derived from their own. So parameters, state dict, hooks, ties, dtype, device and mode are as
    before, `isinstance` holds, and `revert` needs no copy of anything. But for torch's classes, what a norm computes is
    settled now: a later change of its `variance_epsilon` is not seen. A call with more than the one tensor goes to the
    norm's own forward, and so do `torch.jit` and `torch.fx`. Convert before `fully_shard` and accelerate's hooks; a
    compiled model compiles anew on its next call. Where this raises, the model is as it was.

    Args:
        model: Any module.
        inputs: What the model takes: a tensor, a tuple of arguments or a mapping of keyword arguments. It is run once
            on them, without gradients, which shows how each norm is called. By default, modules are tried on
            inputs that fit their parameters, and calls of functions are not seen.
        progress: Called with a stage's name, the steps done and the steps in all.

    Returns:
        What was swapped, with the figures, and what was left alone, with the reason.

    Raises:
        KindError: If model is no module.
        ModelError: If it has no weights yet (meta device), or does not run on the inputs.
        UseError: If its parameters are sharded or offloaded already.

    Example:
        >>> import normkit as nk
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> len(nk.convert(model).swapped)
        1
        >>> type(model[1])
        <class 'normkit.layers.LayerNorm'>
        >>> nk.revert(model)
        ('1',)
    """
    _check(model)
    # Compiled modules run uncompiled: dynamo does not follow hooks, and these calls would use up its recompilations.
    # Before dynamo is loaded nothing is compiled, and loading it takes seconds.
    eager: Any = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    # Tensors are made on the CPU, whatever `torch.set_default_device` says.
    on_the_cpu = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with eager:
        seen = Trace(modules=(), functions=()) if inputs is None else _traced(model, inputs)
        conversion = _Conversion(model, seen, progress or (lambda *_: None))
        with on_the_cpu:
            conversion.verify()
    return ConversionReport(swapped=conversion.swap(), left_alone=tuple(conversion.left_alone))


def revert(model: nn.Module) -> tuple[str, ...]:
    """Undo `convert`: each module is of its own class again, with the parameters, hooks and mode that it has now.

    Args:
        model: What was converted, or a copy of it; it may have been moved, trained or sharded since.

    Returns:
        The paths of the modules that were reverted; none if nothing was converted.

    Raises:
        KindError: If model is no module.
    """
    _check_kind("revert", model)
    converted = {path: module for path, module in model.named_modules() if is_converted(module)}
    for module in converted.values():
        restore(module)
    return tuple(converted)


def _check_kind(name: str, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise KindError(f"{name}: model must be a torch.nn.Module, got {type(model).__name__}")


def _check(model: nn.Module) -> None:
    _check_kind("convert", model)
    # accelerate's mark: parameters that it offloads have values only during a call.
    is_offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    for path, parameter in model.named_parameters():
        if parameter.is_meta and is_offloaded:
            raise UseError(f"convert: {path} is offloaded by accelerate; convert before cpu_offload or dispatch_model")
        if parameter.is_meta:
            raise ModelError(f"convert: {path} is on the meta device and has no values; load the weights first")
        if type(parameter.data) is not Tensor and any(map(is_distributed, (parameter, parameter.data))):
            raise UseError(f"convert: {path} is sharded (a DTensor); convert before fully_shard")


def _traced(model: nn.Module, inputs: object) -> Trace:
    """One recorded forward pass in eval mode."""

    def run() -> object:
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)

    with in_mode(model, training=False), torch.random.fork_rng(devices=[]):
        try:
            return trace(model, run)
        except Exception as error:  # a foreign model may refuse in any way
            raise ModelError(
                f"convert: the model does not run on these inputs ({first_line(error)}); "
                "give a tensor, a tuple of arguments or a dict of keyword arguments"
            ) from error


class _Swap(NamedTuple):
    """The replacement of a norm, the reason if no kernel computes it, and the checks."""

    formula: Formula
    slow: str | None
    checks: tuple[Check, ...]


class _Conversion:
    """The modules of a model from the outside in: a norm is swapped whole, unless it only wraps another."""

    def __init__(self, model: nn.Module, seen: Trace, progress: Progress) -> None:
        self.verified: list[tuple[nn.Module, _Swap]] = []
        self.left_alone: list[LeftAlone] = []
        self._model = model
        self._functions = seen.functions
        self._paths: dict[nn.Module, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(module, []).append(path)
        self._search = Search({call.path: call for call in reversed(seen.modules)})
        self._dtypes = floating_dtypes(model)
        floating = (parameter for parameter in model.parameters() if parameter.is_floating_point())
        self._any_parameter = next(floating, torch.empty(0))
        self._progress = progress
        self._visited: set[nn.Module] = set()

    def verify(self) -> None:
        """Find the norms and verify each; nothing of the model is changed."""
        self._visit(self._model)
        # Calls of norm functions outside the norms that were found.
        found = [path for module, _ in self.verified for path in self._paths[module]]
        found += [left.path for left in self.left_alone]
        for call in self._functions:
            if call.function in NORM_FUNCTIONS.values() and not any(is_within(call.parent, path) for path in found):
                path = f"{call.parent}:{call.function}" + (f"#{call.ordinal + 1}" if call.ordinal else "")
                reason = "a call of a function in the forward of its parent: there is no module to swap"
                self.left_alone.append(LeftAlone(path=path, class_name=call.function, reason=reason))
        self._progress("norms", len(self._paths), len(self._paths))

    def swap(self) -> tuple[SwappedNorm, ...]:
        """Swap all that was verified, or none."""
        done: list[SwappedNorm] = []
        try:
            for module, (formula, slow, checks) in self.verified:
                class_name = type(module).__name__
                path, *others = self._paths[module]
                swap(module, formula)
                done.append(
                    SwappedNorm(
                        path=path,
                        others=tuple(others),
                        class_name=class_name,
                        replacement=type(module).__name__,
                        spec=formula.spec,
                        slow=slow,
                        own_under_autocast=formula.own_under_autocast,
                        checks=checks,
                    )
                )
        except BaseException:
            # Only these: another part of the model may have been converted before.
            for module, _ in self.verified:
                if is_converted(module):
                    restore(module)
            raise
        return tuple(done)

    def _visit(self, module: nn.Module) -> None:
        if module in self._visited:
            return
        self._visited.add(module)
        self._progress("norms", len(self._visited) - 1, len(self._paths))
        if is_normkit(module):
            self._leave(module, "it is normkit's already")
            return
        if isinstance(module, torch.jit.ScriptModule):
            self._leave(module, "it is compiled by torch.jit; convert what it was compiled from")
            return
        found = self._considered(module)
        if isinstance(found, _Swap) and not self._hands_on(module, found.formula):
            self.verified.append((module, found))
            return
        before = len(self.verified) + len(self.left_alone)
        for child in module.children():
            self._visit(child)
        # A wrapper is not reported if the norm inside it was found.
        if isinstance(found, str) and len(self.verified) + len(self.left_alone) == before:
            self._leave(module, found)

    def _hands_on(self, module: nn.Module, formula: Formula) -> bool:
        """Whether a child computes all of it: a wrapper, such as DDP or a counter of calls, keeps its own forward."""
        for name, child in module.named_children():
            inner = self._search.find(child, self._paths[child]).formula
            if inner is not None and inner.spec == formula.spec:
                named = [None if own is None else f"{name}.{own}" for own in (inner.weight, inner.bias)]
                if named == [formula.weight, formula.bias]:
                    return True
        return False

    def _considered(self, module: nn.Module) -> _Swap | str | None:
        """The verified replacement of a module; the reason why there is none; or None if it is no norm."""
        found = self._search.find(module, self._paths[module])
        formula = found.formula
        if formula is None:
            return found.reason
        if "forward" in vars(module):
            return "its forward is set on the object, as accelerate and kernels do; remove that first"
        slow = self._slow(module, formula, found.shape)
        if slow is not None and cpu.load() is None:
            return f"no kernel computes it ({slow}), so it would be slower ({formula.spec})"
        wanted = settings(floating_dtypes(module), self._dtypes)
        try:
            checks = verify(module, formula, found.shape, wanted)
            fails_under_autocast = checks and checks[-1].problem is not None and checks[-1].setting.endswith("autocast")
            if fails_under_autocast and not is_torchs(module):
                formula = formula._replace(own_under_autocast=True)
                plain = tuple(setting for setting in wanted if not setting.autocast)
                checks = verify(module, formula, found.shape, plain)
        except Exception as error:  # a foreign module may refuse in any way
            return f"normkit cannot take its place: {first_line(error)}"
        for check in checks:
            if check.problem is not None:
                doubts = "".join(f"; undecided: {doubt}" for doubt in found.undecided)
                return f"in {check.setting}: {check.problem} ({formula.spec}){doubts}"
        return _Swap(formula, slow, tuple(checks)) if checks else "it runs in none of the dtypes it may be called in"

    def _slow(self, module: nn.Module, formula: Formula, shape: tuple[int, ...]) -> str | None:
        """Why no kernel computes it in its own dtype."""
        weight, bias = formula.parameters_of(module)
        parameter = next((given for given in (weight, bias) if given is not None), self._any_parameter)
        x = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        spec = formula.spec
        if spec.rows.are_places:
            x, spec = x.movedim(1, -1), spec.replace(axes=(-1,))
        return cpu.load() or cpu.supports(spec, x, weight, bias)

    def _leave(self, module: nn.Module, reason: str) -> None:
        path = self._paths[module][0]
        self.left_alone.append(LeftAlone(path=path, class_name=type(module).__name__, reason=reason))
