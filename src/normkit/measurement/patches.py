"""Norms that another code than their own acts on, that serve several places, that are left out, or that hold too much.

A replaced forward, or a pre-hook that changes the input. A kernel in place of a library's code is legitimate, so it is
only reported. The kernel itself is judged by the spec that is declared for the class that it replaces.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from normkit.conventions.rows import Rows
from normkit.identification.sharding import is_elsewhere, local
from normkit.identification.sites import NormSite, OtherNorm
from normkit.identification.state import same, undisturbed
from normkit.identification.tracing import Trace, first_output, first_tensor
from normkit.measurement.facts import place_of
from normkit.models import norm_classes

if TYPE_CHECKING:
    from normkit.measurement.structure import Structure

_LIBRARIES = ("torch.nn.", "transformers.")
_FUNCTIONS = ("layer_norm", "rms_norm", "group_norm")


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Code that replaces a library's own."""

    name: str
    """The class, module or function that it replaces."""
    sites: tuple[str, ...]
    """Paths of the norms that run it; () for a function of torch, which any of them may call."""
    now: str
    """The code in use, and its place."""


def patches(model: nn.Module, paths: Iterable[str]) -> tuple[Patch, ...]:
    """The replaced code of a model's norms."""
    modules = dict(model.named_modules())
    homes = {type(module).__module__ for module in modules.values()}
    found: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        if (module := modules.get(path)) is not None and (seen := _patched(module, homes)) is not None:
            found.setdefault(seen, []).append(path)
    told = [Patch(name=name, sites=tuple(sites), now=now) for (name, now), sites in found.items()]
    for name in _FUNCTIONS:
        function, builtin = getattr(F, name), getattr(torch, name)
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is None or Path(code.co_filename) != Path(F.__file__) or code.co_qualname != name:
            told.append(Patch(name=f"torch.nn.functional.{name}", sites=(), now=_described(function)))
        if not inspect.isbuiltin(builtin):
            told.append(Patch(name=f"torch.{name}", sites=(), now=_described(builtin)))
    return tuple(told)


def is_as_written(cls: type) -> bool:
    """The class runs the forward that its file defines; True for classes of no library, whose files are not known."""
    return _foreign_forward(cls) is None


def stands_for(cls: type, module: str) -> str | None:
    """The declared class, as in "llama.LlamaRMSNorm", in whose place a module of a library holds another one."""
    own = norm_classes.key_of(cls.__module__, cls.__name__)
    for name, held in vars(sys.modules[module]).items() if module in sys.modules else ():
        # A module that merely imports the class holds it under the class's own name.
        if held is cls and (key := norm_classes.key_of(module, name)) != own and key in norm_classes.declared():
            return key
    return None


def _patched(module: nn.Module, homes: Collection[str]) -> tuple[str, str] | None:
    """The replaced code and its replacement; None if the module runs the code of its file.

    `homes` are the Python modules that the classes of the model come from.
    """
    cls = type(module)
    own = vars(module).get("forward")
    # accelerate wraps the forward to move tensors, and keeps the old one beside it.
    if own is not None and cls.__module__.startswith(_LIBRARIES) and "_old_forward" not in vars(module):
        return f"forward of this {cls.__name__}", _described(own)
    if (foreign := _foreign_forward(cls)) is not None:
        return f"{cls.__name__}.forward", _described(foreign)
    for name in sorted(homes):
        if (key := stands_for(cls, name)) is not None:
            return f"{key.partition('.')[2]} of {name}", f"{cls.__qualname__} of {cls.__module__}"
    return None


def _foreign_forward(cls: type) -> Any:
    owner = next((base for base in cls.__mro__ if "forward" in vars(base)), None)
    if owner is None or owner is nn.Module or not owner.__module__.startswith(_LIBRARIES):
        return None
    forward = vars(owner)["forward"]
    code = getattr(inspect.unwrap(forward), "__code__", None)
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    if isinstance(code, CodeType) and file is not None and Path(code.co_filename) == Path(file):
        return None if code.co_qualname == f"{owner.__qualname__}.forward" else forward
    return forward


def _described(code: Any) -> str:
    """Name and place of some code."""
    function = inspect.unwrap(getattr(code, "__func__", code))
    known = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    where = "" if known is None else f" (line {known.co_firstlineno} of {Path(known.co_filename).name})"
    return f"{name} of {getattr(function, '__module__', 'an unknown module')}{where}"


@dataclass(frozen=True, kw_only=True)
class InputHook:
    """A norm with pre-hooks that change its input."""

    path: str
    """Path of the norm."""
    hooks: tuple[str, ...]
    """Names of its pre-hooks, with the file and line of each."""
    change: float
    """Largest difference between the input after the hooks and before them, over the largest magnitude before them."""


def changed_inputs(model: nn.Module, paths: Collection[str], run: Callable[[], object]) -> tuple[InputHook, ...]:
    """Norms with pre-hooks that change the numbers of the input; a conversion of dtype is no change.

    `run` calls the model on a small input; it is not called if no norm has a hook.
    """
    modules = dict(model.named_modules())
    hooked = {path: modules[path] for path in paths if path in modules and modules[path]._forward_pre_hooks}
    given: dict[str, Tensor] = {}
    changes: dict[str, float] = {}

    def named(hook: Callable[..., object]) -> str:
        code = getattr(inspect.unwrap(hook), "__code__", None)
        name = str(getattr(hook, "__qualname__", type(hook).__qualname__))
        return name if code is None else f"{name} of {hook.__module__}, line {code.co_firstlineno}"

    def note(path: str, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if (x := first_tensor(args, kwargs)) is not None:
            given[path] = local(x.detach()).clone()

    def compare(path: str, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        x, meant = first_tensor(args, kwargs), given.pop(path, None)
        if x is None or meant is None:
            return
        entered = local(x.detach())
        meant = meant.to(entered.dtype).to(entered.device)
        if entered.shape == meant.shape and not torch.equal(entered, meant):
            difference = (entered.double() - meant.double()).abs().max() / meant.double().abs().max()
            changes[path] = max(changes.get(path, 0.0), float(difference))

    names = {path: tuple(map(named, module._forward_pre_hooks.values())) for path, module in hooked.items()}
    if hooked:
        with ExitStack() as hooks, torch.no_grad():
            for path, module in hooked.items():
                first, last = partial(note, path), partial(compare, path)
                hooks.callback(module.register_forward_pre_hook(first, with_kwargs=True, prepend=True).remove)
                hooks.callback(module.register_forward_pre_hook(last, with_kwargs=True).remove)
            run()
    return tuple(InputHook(path=path, hooks=names[path], change=change) for path, change in changes.items())


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The calls and the twins of a shared norm."""

    calls: int
    """Calls in one forward pass."""
    around: int
    """Calls of what is around it; a block that runs several times calls each of its norms as often, and so does a
    recurrence, in which the matrices beside a norm are called as often as it is."""
    twins: tuple[str, ...]
    """Other paths with the same module, or with a module that has the same parameter."""


def find_shared(model: nn.Module, structure: Structure) -> dict[str, Sharing]:
    """The norms that serve several places, by path."""
    calls = Counter(call.path for call in structure.called.modules)
    modules = dict(model.named_modules(remove_duplicate=False))
    places = defaultdict(list)
    for path, module in modules.items():
        places[module].append(path)
    owners: dict[int, list[str]] = defaultdict(list)
    for site in structure.sites:
        held = [site.passport.weight, site.passport.bias] if site.module is None else list(site.module.parameters())
        for parameter in held:
            if isinstance(parameter, nn.Parameter) and site.path not in owners[id(parameter)]:
                owners[id(parameter)].append(site.path)
    shared = {}
    for site in structure.sites:
        made, parent = structure.forward_calls[site.path], site.path.rpartition(".")[0]
        own = [path for path in places.get(site.module, ()) if site.module is not None and path != site.path]
        # A block that is listed twice brings its norms along.
        around = {path: path.rpartition(".")[0] for path in own}
        own = [path for path in own if around[path] == parent or modules[around[path]] is not modules[parent]]
        same = [path for paths in owners.values() if site.path in paths for path in paths if path != site.path]
        twins = tuple(dict.fromkeys([*own, *same]))
        if made > (usual := _usual_calls(model, site, calls)) or twins:
            shared[site.path] = Sharing(calls=made, around=usual, twins=twins)
    return shared


def _usual_calls(model: nn.Module, site: NormSite, calls: Mapping[str, int]) -> int:
    """How often a norm that is not shared is called there.

    As often as the enclosing module, or where that takes no activations, as the busiest module beside the norm; or as
    the busiest module with a matrix that stands right beside it, or beside the list that holds it.
    """
    parent = site.path.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    beside = (
        made
        for path, made in calls.items()
        if path.startswith(prefix) and not f"{path}.".startswith(f"{site.path}.") and path != parent
    )
    around = calls[parent] if parent in calls else max(beside, default=1)
    while parent and parent not in calls:
        parent = parent.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    in_a_recurrence = (
        calls[f"{prefix}{name}"]
        for name, module in model.get_submodule(parent).named_children()
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    )
    return max(around, *in_a_recurrence, 1)


def applied_to_own_output(model: nn.Module, paths: Collection[str], run: Callable[[], object]) -> frozenset[str]:
    """The norms that are called on rows that their own call before returned, bit for bit.

    `run` calls the model on a small input; it is not called without a path.
    """
    left: dict[str, set[bytes]] = {}
    found = set()

    def note(
        path: str, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
    ) -> None:
        x, y = first_tensor(args, kwargs), first_output(output)
        if x is None or y is None:
            return
        entered = _rows_of(x)
        # A row of zeros leaves as zeros without a norm having had any part in it.
        if path in left and entered and entered <= left[path] and bool(x.any()):
            found.add(path)
        left[path] = _rows_of(y)

    if paths:
        with ExitStack() as hooks:
            for path in paths:
                handle = model.get_submodule(path).register_forward_hook(partial(note, path), with_kwargs=True)
                hooks.callback(handle.remove)
            run()
    return frozenset(found)


def _rows_of(x: Tensor) -> set[bytes]:
    rows = local(x.detach()).float().cpu()
    return {row.numpy().tobytes() for row in rows.reshape(-1, rows.shape[-1])} if rows.numel() else set()


@dataclass(frozen=True, kw_only=True)
class Omission:
    """A norm that runs in all modules of one class at one place but one."""

    path: str
    """The device it would run on."""
    others: int
    """Modules in which it runs."""
    is_uncalled: bool
    """It is there and never called; else the identity or nothing is in its place."""
    is_first: bool
    """The module without it is the first of them."""


@dataclass(frozen=True, kw_only=True)
class OddRows:
    """A norm whose rows are other ones than those of the same norm in all other modules of a class, which agree."""

    path: str
    rows: Rows
    usual: Rows
    others: int
    """Norms that agree."""


def unlike_the_others(
    model: nn.Module, trace: Trace, sites: Sequence[NormSite], others: Sequence[OtherNorm]
) -> tuple[tuple[Omission, ...], tuple[OddRows, ...]]:
    """The norms that one called module of a class lacks, or has over other rows, where all its others agree.

    A norm that is lacking is looked for among modules that have one path but for its numbers; those of the class at
    other paths count where all of them have it.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    called = {call.path for call in trace.modules}
    norms = {other.path for other in others} | {site.path for site in sites}
    running = {id(modules[path]) for path in norms if path in modules}
    calling_functions = {site.parent for site in sites if site.module is None}
    # A norm may be a function that the module in its place calls.
    by_path = {site.path.partition(":")[0]: site for site in reversed(sites)}
    alike: dict[type, list[str]] = defaultdict(list)
    for path in modules:
        # The members of two sequences are unrelated.
        if path in called and not isinstance(modules[path], nn.Sequential):
            alike[type(modules[path])].append(path)
    omissions, odd_rows = [], []
    for members in alike.values():
        for name in dict.fromkeys(name for path in members for name, _ in modules[path].named_children()):
            there = {path: modules.get(f"{path}.{name}") for path in members}
            kinds = {type(module) for module in there.values() if id(module) in running}
            lacking = [path for path, module in there.items() if id(module) not in running]
            for path in lacking:
                place = [each for each in members if place_of(each) == place_of(path)]
                missing, at = there[path], f"{path}.{name}"
                is_uncalled = type(missing) in kinds and at not in called
                is_alone = len(place) > 1 and [each for each in place if each in lacking] == [path]
                # Another module in its place may normalize in a way that was not recognised.
                is_gone = missing is None or isinstance(missing, nn.Identity) or is_uncalled
                # A module without other parts as well is made otherwise, as the last block of a joint transformer is.
                parts = {
                    part for each in place for part, held in modules[each].named_children() if id(held) not in running
                }
                is_gone &= all(f"{path}.{part}" in modules for part in parts)
                if is_alone and is_gone and path not in calling_functions:
                    number = len(members if len(lacking) == 1 else place) - 1
                    is_first = path == place[0]
                    omissions.append(Omission(path=at, others=number, is_uncalled=is_uncalled, is_first=is_first))
            found = {each.path: each for path in members if (each := by_path.get(f"{path}.{name}")) is not None}
            ordered = Counter(each.spec.rows for each in found.values()).most_common()
            if len(ordered) != 2 or ordered[1][1] > 1 or ordered[0][1] < 2:
                continue
            (usual, number), (rows, _) = ordered
            odd = next(each for each in found.values() if each.spec.rows == rows)
            # Fewer channels may not divide into as many groups.
            widths = [each.shape for each in found.values() if each is not odd]
            if rows.axes != usual.axes or odd.shape in widths:
                odd_rows.append(OddRows(path=odd.path, rows=rows, usual=usual, others=number))
    return tuple(omissions), tuple(odd_rows)


def idle_parameters(sites: Sequence[NormSite]) -> dict[str, tuple[str, ...]]:
    """Names of the parameters of norms that change no output, by path: each is replaced by other numbers in a call."""
    found = {}
    for site in sites:
        module = site.module
        own = {} if module is None else dict(module.named_parameters())
        # Parameters that all act need no call.
        if module is None or len(own) <= site.spec.has_weight + site.spec.has_bias:
            continue
        if any(is_elsewhere(parameter) or not parameter.is_floating_point() for parameter in own.values()):
            continue
        device = next(iter(own.values())).device
        try:
            with undisturbed(), torch.no_grad():
                x = torch.randn(site.passport.shape).to(device, getattr(torch, site.passport.dtype))
                before = first_output(module(x))
                after = {
                    name: first_output(functional_call(module, {name: parameter + torch.rand_like(parameter) + 0.5}, x))
                    for name, parameter in own.items()
                }
        # Any third-party forward runs here.
        except Exception:
            continue
        names = [name for name, y in after.items() if before is not None and y is not None and same(before, y)]
        if names:
            found[site.path] = tuple(names)
    return found
