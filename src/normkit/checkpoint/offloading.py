"""A checkpoint opened without its weights: accelerate reads those of each module from the files for each call of it."""

from __future__ import annotations

import functools
import inspect
import re
import shutil
import tempfile
import weakref
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from normkit.checkpoint.build_model import BuiltModel, build_model
from normkit.checkpoint.model_folder import INDEX, WEIGHTS
from normkit.checkpoint.reader import TORCH, read_header
from normkit.errors import InputError, ModelError
from normkit.identification.offloading import Stored, in_memory, offload_hooks, stored
from normkit.identification.sites import is_within
from normkit.text import installed_version

_RESIDENT = 2**16
"""A module with no more numbers keeps them in memory: norms, and maps too small to be worth a read for each call."""


def build_offloaded(
    values: dict[str, Any], files: list[Path], folder: Path, *, text_only: bool, dtype: Any
) -> BuiltModel:
    """Have transformers build the model that a configuration names, with its weights left in the files.

    Weights that the class holds in another form than the file, such as experts in one tensor, are written to a folder
    below the one for temporary files, which goes with the model.

    Args:
        values: The result of `read_config`.
        files: The result of `weight_files`.
        folder: Where both are.
        text_only: Refuse a class that does not read text.
        dtype: Of torch, or "auto".

    Raises:
        InputError: If accelerate or transformers 5 is not installed, or such weights cannot be written.
        ModelError: If a file is damaged, or transformers cannot build the model.
    """
    import torch
    from safetensors import SafetensorError

    if find_spec("accelerate") is None:
        raise InputError("offloading needs accelerate, which is not installed; pip install 'normkit[offload]'")
    if (version := installed_version("transformers") or "").startswith("4."):
        raise InputError(f"offloading needs transformers 5, which knows tied weights in files; {version} is installed")
    tensors = {name: held for file in files for name, held in read_header(file).items()}
    if unknown := next((name for name, held in tensors.items() if held.dtype not in TORCH), None):
        raise ModelError(f"{unknown} in {folder} is {tensors[unknown].dtype}, which torch does not have; convert it")
    empty = {name: torch.empty(held.shape, dtype=TORCH[held.dtype], device="meta") for name, held in tensors.items()}
    # Without a file, to know which weights the files lack: those are drawn at random, and stay in memory.
    planned = build_model(values, empty, folder, text_only=text_only, dtype=dtype, device_map="meta")
    if planned.mismatched:
        return planned
    try:
        scratch = Path(tempfile.mkdtemp(prefix="normkit-offload-"))
        view = scratch / "files"
        view.mkdir()
        # transformers sees nothing of the folder but its weights.
        for file in files if files[0].name == WEIGHTS else [*files, folder / INDEX]:
            (view / file.name).symlink_to(file.resolve())
        # It asks for this file of each folder.
        (view / "generation_config.json").write_text("{}")
    except OSError as error:
        raise InputError(_unwritten(error)) from None
    try:
        built = build_model(
            values | {"architectures": [type(planned.model).__name__]},
            empty,
            folder,
            view=view,
            text_only=text_only,
            # It would hold each weight in another dtype at once; drawn ones must be drawn in theirs.
            dtype=dtype if planned.missing else "auto",
            device_map=_places(planned.model, "", planned.missing),
            offload_folder=str(scratch / "weights"),
        )
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if "Cannot allocate memory" in str(error):
            largest = max(files, key=lambda file: file.stat().st_size)
            size = f"{largest.stat().st_size / 1e9:.1f} GB"
            raise ModelError(
                f"Linux does not map {largest} ({size}), which is larger than memory and swap together; allow it with "
                "`sudo sysctl vm.overcommit_memory=1`, or get the model in smaller files"
            ) from None
        # The headers are whole: what fails is a file that transformers writes.
        if isinstance(error, ModelError) and isinstance(error.__cause__, (OSError, SafetensorError)):
            raise InputError(_unwritten(error.__cause__)) from None
        raise
    weakref.finalize(built.model, shutil.rmtree, scratch, ignore_errors=True)
    _cast(built.model, planned.model)
    _settle(built.model)
    for module in built.model.modules():
        read = frozenset[str]().union(*map(_read_by, type(module).__mro__))
        parts = [part for name, part in module.named_children() if name in read and offload_hooks(part)]
        owners = _first_owners(module)
        if parts or owners:
            borrowed = _Borrowed(parts, owners)
            module.register_forward_pre_hook(borrowed.begin)
            module.register_forward_hook(borrowed.end, always_call=True)
    return built._replace(asked=planned.asked, head=planned.head)


def _places(module: Any, path: str, missing: Sequence[str]) -> dict[str, str]:
    """A device_map for a module: what holds no missing weight goes to the disk. accelerate takes no nested entries."""
    within = [name for name in missing if is_within(name, path)]
    parts = dict(module.named_children())
    own = any(True for _ in chain(module.parameters(recurse=False), module.buffers(recurse=False)))
    if not within or own or not parts:
        return {path: "cpu" if within else "disk"}
    found = (_places(part, f"{path}.{name}" if path else name, within) for name, part in parts.items())
    return {name: place for places in found for name, place in places.items()}


def _cast(model: Any, planned: Any) -> None:
    """Give parameters and buffers the dtypes that they have in a planned model; values on the disk follow when read."""
    from torch import nn

    for module, meant in zip(model.modules(), planned.modules(), strict=True):
        if hasattr(module, "config"):
            module.config.dtype = meant.config.dtype
        for name, value in module._parameters.items():
            if value is not None and value.dtype != meant._parameters[name].dtype:
                cast = value.detach().to(meant._parameters[name].dtype)
                module._parameters[name] = nn.Parameter(cast, requires_grad=value.requires_grad)
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = value.to(meant._buffers[name].dtype)


def _settle(model: Any) -> None:
    """Give small modules their values for good, and take away the hooks that have nothing to read."""
    from accelerate.hooks import remove_hook_from_module
    from torch import nn

    parts: dict[nn.Module, dict[str, Stored]] = {}
    for name, held in stored(model).items():
        path, _, key = name.rpartition(".")
        parts.setdefault(model.get_submodule(path), {})[key] = held
    # Tensors that a small module shares with a large one stay in the files for both.
    in_files = {
        held.place
        for module, own in parts.items()
        if sum(module.get_parameter(key).numel() for key in own) > _RESIDENT
        for held in own.values()
    }
    kept: dict[Hashable, nn.Parameter] = {}
    for module, own in parts.items():
        if any(held.place in in_files for held in own.values()):
            continue
        for key, held in own.items():
            if held.place not in kept:
                # A copy: what is read of a file maps all of it.
                kept[held.place] = nn.Parameter(_copied(held.read()), module.get_parameter(key).requires_grad)
            module._parameters[key] = kept[held.place]
    for module in model.modules():
        if "_hf_hook" in vars(module) and not any(each.is_meta for each in module.parameters(recurse=False)):
            remove_hook_from_module(module)
            # It leaves the method of the class as an attribute of the module.
            if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
                del module.forward


def _copied(value: Any) -> Any:
    """A copy that starts as far behind a multiple of 64 bytes, which torch allocates at, as the tensor itself.

    The model in memory is mapped from the file, and kernels add in another order where a tensor starts elsewhere.
    """
    before = value.data_ptr() % 64 // value.element_size()
    return value.new_empty(before + value.numel())[before:].view(value.shape).copy_(value)


@functools.cache
def _read_by(class_: type) -> frozenset[str]:
    """The parts whose weights a class reads without a call of the part, as its own code says: its source is read once.

    An example is `out_proj` of torch.nn.MultiheadAttention. accelerate reads the weights of a part when it is called.
    """
    try:
        code = inspect.getsource(class_)
    except (OSError, TypeError):
        return frozenset()
    return frozenset(re.findall(r"\bself\.(\w+)\.(?:weight|bias)\b(?!\.(?:dtype|device|shape|size)\b)", code))


def _first_owners(module: Any) -> list[Any]:
    """The offloaded modules with the first parameter of those models whose `device` the module reads."""
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel):
        return []
    class_: type = type(module)
    read = _asked_for_device(class_)
    models = [each for name, each in [("", module), *module.named_children()] if name in read]
    owners = [next((part for part in each.modules() if [*part.parameters(recurse=False)]), module) for each in models]
    # The module's own parameters are there during a call of it.
    return [owner for owner in owners if owner is not module and offload_hooks(owner)]


@functools.cache
def _asked_for_device(class_: type) -> frozenset[str]:
    """The models whose `device` a call of a model may read, "" for its own, as the code that `forward` reaches says.

    transformers answers with the device of the model's first parameter.
    """
    reached, read = ["forward"], set[str]()
    for name in reached:
        for function in filter(inspect.isfunction, (vars(each).get(name) for each in class_.__mro__)):
            try:
                code = inspect.getsource(function)
            except OSError:
                continue
            reached += {*re.findall(r"\bself\.(\w+)\(", code)}.difference(reached)
            read |= {*re.findall(r"\bself\.(?:(\w+)\.)?device\b", code)}
    return frozenset(read)


class _Borrowed:
    """Parts that have the values of their parameters for each call of the module that reads them.

    Owners have the values of their own parameters only, not those of their parts.
    """

    def __init__(self, parts: Sequence[Any], owners: Sequence[Any]) -> None:
        self.parts, self.owners = parts, owners
        self.calls: list[ExitStack] = []

    def begin(self, *_of_call: object) -> None:
        """Give the parts their values."""
        stack = ExitStack()
        for part in self.parts:
            stack.enter_context(in_memory(part))
        for owner in self.owners:
            stack.enter_context(in_memory(owner, recurse=False))
        self.calls.append(stack)

    def end(self, *_of_call: object) -> None:
        """Take them away again."""
        self.calls.pop().close()


def _unwritten(error: object) -> str:
    reason = getattr(error, "strerror", None) or error
    return (
        f"cannot write weights that are offloaded below {tempfile.gettempdir()}: {reason}; set TMPDIR to a folder with "
        "room for them"
    )
