"""Runs a model for an inspection: in evaluation mode, on its own device, on a batch or on the beginning of one."""

from __future__ import annotations

import inspect as signatures
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from normkit.conventions.rows import Rows
from normkit.errors import InputError
from normkit.identification.offloading import device_of
from normkit.identification.products import quick_products
from normkit.identification.state import in_mode
from normkit.text import counted

Batch: TypeAlias = Mapping[Any, Any]
"""The arguments of one call by name; those that have none, as of `forward(*args)`, by their position. Values are
tensors, numbers, strings, None, and lists, tuples and dictionaries of these."""

_TAKEN = "tensors, numbers, strings, None, and lists, tuples and dictionaries of these"
_PLAIN = (Tensor, bool, int, float, complex, str, type(None))
# Keys of a config that tell how many learnt rows a decoder puts to an image, as DETR and BLIP-2 do.
_QUERIES = ("num_queries", "num_query_tokens")
_MEDIA = ("pixel_values", "input_features", "input_values")
_NO_TOKENS = ("mask", "type_ids", "position_ids", "labels")
# Enough to see every module called; the structure of a model does not depend on its input.
_STRUCTURE_TOKENS = 16


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no cache inside; outside, every module's own mode and the configuration's word on caches."""
    # Some models take use_cache through **kwargs only: what a replayed block adds to a cache would stay in it.
    configs: dict[int, Any] = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    try:
        for config in caching:
            config.use_cache = False
        with in_mode(model, training=False):
            yield
    finally:
        for config in caching:
            config.use_cache = True


def batches_of(given: Any) -> Iterator[Any]:
    """The single batches in what a user gave: a dictionary, a tensor or a tuple with a tensor in it is one.

    Raises:
        InputError: If it is no batch and no iterable of batches.
    """
    if isinstance(given, (Mapping, Tensor)):
        return iter([given])
    if isinstance(given, tuple) and any(not isinstance(member, (Mapping, Sequence)) for member in given):
        return iter([given])
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise InputError(
            "batches must be a dictionary of keyword arguments, a tensor, a tuple of positional arguments, or an "
            f"iterable of such, got {_kind(given)}"
        )
    return iter(given)


def arguments(model: nn.Module, given: Any) -> Batch:
    """One batch as the arguments of one call: positional ones under the names that the model's forward gives them.

    Args:
        model: The model; it is not changed.
        given: A dictionary of keyword arguments, a tensor, or a tuple or list of positional arguments.

    Raises:
        InputError: If it is none of these, holds something else than tensors, numbers, strings, None, and lists, tuples
            and dictionaries of these, holds no tensor, or has more members than forward has parameters.
    """
    if isinstance(given, Mapping):
        batch: Batch = {key: _checked(value, str(key)) for key, value in given.items()}
    elif isinstance(given, Tensor):
        batch = _named(model, (given,))
    elif isinstance(given, (tuple, list)):
        batch = _named(model, tuple(_checked(value, f"argument {place}") for place, value in enumerate(given)))
    else:
        raise InputError(
            "a batch must be a dictionary of keyword arguments, a tensor, or a tuple or list of positional arguments, "
            f"got {_kind(given)}"
        )
    if not any(True for _ in tensors(batch)):
        raise InputError("a batch must hold a tensor, this one holds none")
    if not (first := first_of(batch)).numel():
        raise InputError(f"a batch must hold at least one sample, this one has shape {tuple(first.shape)}")
    return batch


def fitted(model: nn.Module, batch: Batch) -> Batch:
    """The batch as the model takes it: token ids, or the only argument, go first where it has another name for them.

    Media come in its dtype.

    Raises:
        InputError: If it takes no argument of some other name.
    """
    parameters = [*signatures.signature(model.forward).parameters.values()]
    names = [each.name for each in parameters]
    ids = name_of_ids(batch) or (next(iter(batch)) if len(batch) == 1 else None)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    is_named = ids is None or ids in names or 0 in batch
    if is_named or not parameters or parameters[0].kind is not parameters[0].POSITIONAL_OR_KEYWORD:
        fitted, rest = dict(batch), {} if takes_any else batch
    else:
        fitted = {0: batch[ids], **{key: value for key, value in batch.items() if key != ids}}
        rest = {key: value for key, value in fitted.items() if key and not takes_any}
    strange = [key for key in rest if isinstance(key, str) and key not in names]
    # A mask that masks nothing need not be said.
    if needed := [key for key in strange if not (key == "attention_mask" and token_mask(batch) is None)]:
        raise InputError(
            f"{type(model).__name__}.forward({', '.join(names)}) takes no {', '.join(needed)}; "
            "give batches with the arguments of both models, or token ids alone"
        )
    dtype = getattr(model, "dtype", None)
    return {
        # A processor makes images and sound in the dtype of the model that it was made for.
        key: value.to(dtype) if key in _MEDIA and isinstance(dtype, torch.dtype) else value
        for key, value in fitted.items()
        if key not in strange
    }


def _checked(value: Any, name: str) -> Any:
    """The value with plain dictionaries in place of other mappings."""
    if isinstance(value, Mapping):
        return {key: _checked(member, f"{name}[{key!r}]") for key, member in value.items()}
    if isinstance(value, (tuple, list)):
        members = [_checked(member, f"{name}[{place}]") for place, member in enumerate(value)]
        return _like(value, members)
    if not isinstance(value, _PLAIN):
        raise InputError(f"a batch may hold {_TAKEN}; {name} is {_kind(value)}")
    return value


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _named(model: nn.Module, values: tuple[Any, ...]) -> Batch:
    try:
        signature = signatures.signature(model.forward)
        bound = signature.bind(*values).arguments
    except ValueError:
        return dict(enumerate(values))
    except TypeError as error:
        named = ", ".join(signature.parameters)
        count = counted(len(values), "positional argument")
        words = f"{type(model).__name__}.forward({named}) cannot be called with {count}"
        raise InputError(f"{words}: {error}; give a dictionary of keyword arguments") from error
    by_name = (signatures.Parameter.POSITIONAL_OR_KEYWORD, signatures.Parameter.KEYWORD_ONLY)
    if all(signature.parameters[name].kind in by_name for name in bound):
        return bound
    return dict(enumerate(values))


def mapped(value: Any, change: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """A tree of tuples, lists and plain dictionaries with every tensor changed; `change` is told the key above it."""
    if isinstance(value, Tensor):
        return change(name, value)
    if isinstance(value, (tuple, list)):
        return _like(value, [mapped(member, change, name) for member in value])
    if type(value) is dict:
        return {key: mapped(member, change, str(key)) for key, member in value.items()}
    return value


def _like(value: Sequence[Any], members: list[Any]) -> Any:
    """The members as that kind of sequence: a named tuple takes each by itself."""
    return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)  # type: ignore[call-arg]


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tree, with the key above it."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from tensors(member, str(key))
    elif isinstance(value, (tuple, list)):
        for member in value:
            yield from tensors(member, name)


def runner(model: nn.Module, batch: Batch) -> Callable[[], object]:
    """A call of the model on a batch on its own device, without a cache of keys and values.

    Products of 16-bit matrices go the quick way that `quick_products` describes.
    """
    call = caller(model, prepared(model, batch))

    def run() -> object:
        with quick_products(model):
            return call()

    return run


def prepared(model: nn.Module, batch: Batch) -> Batch:
    """The batch on the model's own device, with the word that no cache of keys and values is wanted."""
    device = device_of(model)
    moved: dict[Any, Any] = mapped(dict(batch), lambda _name, value: value.to(device))
    if "use_cache" in signatures.signature(model.forward).parameters:
        moved["use_cache"] = False
    return moved


def caller(model: nn.Module, batch: Batch) -> Callable[[], object]:
    """A call of the model with the arguments of a batch."""
    positional = [value for key, value in batch.items() if isinstance(key, int)]
    named = {key: value for key, value in batch.items() if not isinstance(key, int)}
    return lambda: model(*positional, **named)


def part(batch: Batch, ids: Tensor, chosen: slice | list[int], columns: int | None) -> dict[Any, Any]:
    """Some rows of a batch, and so many columns of what has as many as the ids; all of them are attended to."""

    def few(name: str, value: Tensor) -> Tensor:
        cut = value[chosen] if value.dim() and len(value) == len(ids) else value
        if columns is not None and value.dim() > 1 and value.shape[1] == ids.shape[1]:
            cut = cut[:, :columns]
        # The first tokens of a padded sequence may be padding.
        return torch.ones_like(cut) if name.endswith("attention_mask") and value.dim() == 2 else cut

    return changed(batch, few)


def first_tokens(batch: Batch) -> dict[Any, Any]:
    """The first row's first tokens, all of them attended to; beside an image or a recording, all of its tokens."""
    columns, samples = _STRUCTURE_TOKENS if _medium(batch) == "token" else None, len(first_of(batch))

    def small(name: str, value: Tensor) -> Tensor:
        has_rows = value.dim() > 1 or (value.dim() == 1 and len(value) == samples)
        few = value[:1] if has_rows else value
        few = few[:, :columns] if few.dim() > 1 else few
        return torch.ones_like(few) if name.endswith("attention_mask") else few

    return changed(batch, small)


def rows(batch: Batch, first: int, count: int = 1) -> dict[Any, Any]:
    """The rows of a batch from `first` on; vectors of another length than the batch and numbers stay as they are."""
    whole = first_of(batch)

    def part(_name: str, value: Tensor) -> Tensor:
        has_rows = value.dim() > 1 or (value.dim() == 1 and len(value) == len(whole))
        return value[first : first + count] if has_rows else value

    return changed(batch, part)


def changed(batch: Batch, change: Callable[[str, Tensor], Tensor]) -> dict[Any, Any]:
    """The batch with every tensor changed; `change` is told the key above it."""
    whole: dict[Any, Any] = mapped(dict(batch), change)
    return whole


def first_of(batch: Batch) -> Tensor:
    """The first tensor of a batch with two axes or more, else the one with most; a mask only if there is no other."""
    found = tensors(batch)
    return max(found, key=lambda each: (not each[0].endswith(_NO_TOKENS), min(each[1].dim(), 2)))[1]


def token_mask(batch: Batch) -> Tensor | None:
    """True where a token counts, or None where all do."""
    mask = next((value for name, value in tensors(batch) if name == "attention_mask"), None)
    return None if mask is None or bool(mask.all()) else mask.bool()


def name_of_ids(batch: Batch) -> str | None:
    """The argument that holds token ids of shape (B, T): "input_ids", else the only one of whole numbers; or None."""
    if _is_ids(batch.get("input_ids")):
        return "input_ids"
    names = [name for name, value in batch.items() if _is_ids(value) and not str(name).endswith(_NO_TOKENS)]
    return names[0] if len(names) == 1 else None


def token_ids(batch: Batch) -> Tensor | None:
    """The token ids of shape (B, T), or None where a batch has none or several."""
    name = name_of_ids(batch)
    return None if name is None else batch[name]


def _is_ids(value: object) -> bool:
    whole = isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool
    return whole and isinstance(value, Tensor) and value.dim() == 2 and value.numel() > 0


def unit(batch: Batch) -> str:
    """The unit of a batch: "token", or "image" or "recording" for a model that reads these alone.

    Images are floating-point tensors of four axes or more; recordings go by the names that transformers gives them.
    """
    return "token" if "input_ids" in batch else _medium(batch)


def _medium(batch: Batch) -> str:
    """The same without a look at token ids: what there is beside them."""
    found = [(name, value) for name, value in tensors(batch) if value.is_floating_point()]
    if any(value.dim() > 3 or name.startswith("pixel_values") for name, value in found):
        return "image"
    return "recording" if any(name in ("input_features", "input_values") for name, _ in found) else "token"


def row_name(model: nn.Module, batch: Batch, shape: Sequence[int], rows: Rows, role: str) -> str:
    """The name of one row of a norm, told from the shape of the norm's input in the run of a batch.

    Args:
        model: The model, whose config may tell how many queries it puts to an image.
        batch: The batch.
        shape: Of what enters the norm.
        rows: Which axes of it make a row.
        role: The role of the norm: one of queries or keys has an axis of heads.
    """
    whole, ids = _medium(batch), token_ids(batch)
    # Tokens may lie flat, and queries and keys have an axis of heads before or behind them.
    if whole == "token" or (ids is not None and _has_tokens(shape, ids.shape, role)):
        return "token"
    if rows.are_samples:
        if rows.groups == 1:
            return whole
        channels = shape[rows.channel_axis or 1]
        return "channel" if rows.groups == channels else "channel group"
    taken = 1 if rows.are_places else len(rows.axes)
    if len(shape) > taken and math.prod(shape[1 : len(shape) - taken]) == 1 and shape[0] == len(first_of(batch)):
        return whole
    config = getattr(model, "config", None)
    if len(shape) - taken == 2 and shape[1] in (getattr(config, name, None) for name in _QUERIES):
        return "query"
    if whole == "recording":
        return "frame"
    return "pixel" if len(shape) - taken == 3 and role != "query-key" else "patch"


def _has_tokens(shape: Sequence[int], ids: Sequence[int], role: str) -> bool:
    samples, tokens = ids
    axes = shape[1:-1] if role == "query-key" else shape[1:2]
    return (len(shape) > 2 and shape[0] == samples and tokens in axes) or (
        len(shape) == 2 and shape[0] == samples * tokens
    )


def vocabulary(model: nn.Module) -> int | None:
    """Number of tokens that a model embeds, or None if it is not known.

    A model of transformers tells; of any other the last linear layer does, where some embedding has as many entries as
    it has outputs.
    """
    find = getattr(model, "get_input_embeddings", None)
    if find is not None:
        try:
            return int(find().weight.shape[0])
        except (AttributeError, NotImplementedError):
            return None
    outputs = [module.out_features for module in model.modules() if isinstance(module, nn.Linear)][-1:]
    embedded = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    return next((size for size in outputs if size in embedded), None)
