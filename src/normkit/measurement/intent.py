"""The intent of a model: its stock `transformers` class, built from the model's own config.

It is built on the meta device, without weights. The formula of each norm is declared, class by class, in
`normkit.models.norm_classes`: code in memory may be patched. A class that is not declared there is identified by
behaviour, as the model's own norms are.
"""

from __future__ import annotations

import copy
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from normkit import reference
from normkit.checkpoint.build_model import KEY, quiet_libraries, recorded, replay
from normkit.conventions.gain import Gain
from normkit.errors import ModelError
from normkit.identification.behaviour import examine
from normkit.identification.finder import likeness, may_be_norm
from normkit.identification.state import undisturbed
from normkit.measurement.patches import is_as_written, stands_for
from normkit.models import norm_classes
from normkit.models.family import declared_family
from normkit.spec import NormSpec

# For a norm without parameters in a model without an embedding: any width is as good.
_SOME_WIDTH = 64


@dataclass(frozen=True, eq=False, kw_only=True)
class Intent:
    """The formulas of the norms in the stock class of a model."""

    source: str
    """Name of the stock class."""
    specs: Mapping[str, NormSpec]
    """Formulas of the norms, by path."""
    initial_gains: Mapping[str, float] = field(default_factory=dict)
    """The value of every entry of a gain at initialisation, offset included, by path."""
    replaced: frozenset[str] = frozenset()
    """Paths of norms at which the model has a module of another class, or none."""
    stock: frozenset[str] = frozenset()
    """Paths whose module has the stock class and runs the forward that the file of the class defines; of norms, with
    the numbers, such as eps, that the class gives them."""
    features: Mapping[str, int] = field(default_factory=dict)
    """Number of features of a row, by path, for norms whose parameters tell it."""
    tied: tuple[frozenset[str], ...] = ()
    """Groups of paths whose norms share a parameter in the stock class."""
    declared: frozenset[str] = frozenset()
    """Paths whose spec is declared for their class, so that it does not depend on code in memory."""
    batch_eps: Mapping[str, float] = field(default_factory=dict)
    """The eps of the batch norms of PyTorch in the stock class, by path."""
    batch_momenta: Mapping[str, float | None] = field(default_factory=dict)
    """Their momentum."""


def stock_intent(model: nn.Module) -> Intent | None:
    """The formulas of the norms in the stock `transformers` class of the model's config.

    Returns:
        The intent; None for a model that is no `transformers` model, has no config that `transformers`
        knows, or names its modules otherwise than the stock class.
    """
    # A model of transformers has imported it; any other has no use for it.
    if "transformers" not in sys.modules:
        return None
    with quiet_libraries(), undisturbed():
        return next((intent for stock_class in _stock_classes(model) if (intent := _intent(model, stock_class))), None)


def _intent(model: Any, stock_class: Any) -> Intent | None:
    """The intent if the class can be built and the model has at least half of its norms' paths."""
    stock = _built(stock_class, model.config)
    if stock is None:
        return None
    here, there = dict(model.named_modules()), dict(stock.named_modules())
    norms = _norms(stock)
    batch_eps = {path: module.eps for path, module in there.items() if isinstance(module, _BatchNorm)}
    momenta = {path: module.momentum for path, module in there.items() if path in batch_eps}
    paths = {*norms, *batch_eps}
    if not paths or 2 * sum(path in here for path in paths) < len(paths):
        return None
    # Another class, or no module although the enclosing module is there.
    replaced = [
        path
        for path in norms
        if (type(here[path]) is not type(there[path]) if path in here else path.rpartition(".")[0] in here)
    ]
    # Folding takes nearly all of them out.
    lost = [path for path in batch_eps if path in here and getattr(here[path], "running_mean", None) is None]
    replaced += lost if 2 * len(lost) < len(batch_eps) else []
    own = [path for path in there if path in here and type(here[path]) is type(there[path])]
    own = [path for path in own if path not in norms or _has_numbers_of(here[path], there[path])]
    # accelerate wraps the forward to read parameters, and keeps the old one beside it.
    replaced_code = {path for path in own if "forward" in vars(here[path]) and "_old_forward" not in vars(here[path])}
    owners: dict[int, set[str]] = defaultdict(set)
    for name, parameter in stock.named_parameters(remove_duplicate=False):
        if (path := name.rpartition(".")[0]) in norms:
            owners[id(parameter)].add(path)
    return Intent(
        source=stock_class.__name__,
        specs={path: norm.spec for path, norm in norms.items()},
        initial_gains={path: norm.gain for path, norm in norms.items() if norm.gain is not None},
        replaced=frozenset(replaced),
        stock=frozenset(path for path in own if path not in replaced_code and is_as_written(type(here[path]))),
        features={path: norm.features for path, norm in norms.items() if norm.features is not None},
        tied=tuple({frozenset(paths): None for paths in owners.values() if len(paths) > 1}),
        declared=frozenset(path for path, norm in norms.items() if norm.is_declared),
        batch_eps=batch_eps,
        batch_momenta=momenta,
    )


def _has_numbers_of(module: nn.Module, stock: nn.Module) -> bool:
    """A module has the eps, the number of groups and any other such attribute of a module of the stock class."""
    numbers = {name: value for name, value in vars(stock).items() if isinstance(value, (int, float, tuple))}
    public = (name for name in numbers if not name.startswith("_") and name != "training")
    return all(vars(module).get(name, numbers[name]) == numbers[name] for name in public)


def _stock_classes(model: Any) -> Iterator[Any]:
    """The stock class that a model is or derives from, then those that its config names or maps to."""
    import transformers

    config = getattr(model, "config", None)
    if not isinstance(config, transformers.PretrainedConfig):
        return
    yield from [ancestor for ancestor in type(model).__mro__ if ancestor.__module__.startswith("transformers.models.")][
        :1
    ]
    yield from [getattr(transformers, name) for name in config.architectures or () if hasattr(transformers, name)]
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            yield mapping[type(config)]


def _built(stock_class: Any, config: Any) -> nn.Module | None:
    """The class built from a copy of the config on the meta device, or None where it cannot be.

    With the norms that folding has recorded there: a LayerNorm that became an RMSNorm is meant to be one.
    """
    config = copy.deepcopy(config)
    if (getattr(config, "pad_token_id", None) or 0) >= (getattr(config, "vocab_size", None) or math.inf):
        # A vocabulary that was cut keeps the number of its padding token; no norm depends on it.
        config.pad_token_id = None
    try:
        with torch.device("meta"):
            built: Any = stock_class(config)
            built.tie_weights()
            record = {KEY: vars(config)[KEY]} if KEY in vars(config) else {}
            replay(built, recorded(record, "the config"), "the config")
            model: nn.Module = built.eval()
            return model
    # Any third-party constructor runs here; a model that cannot be rebuilt has no known intent.
    except Exception:
        return None


@dataclass(frozen=True)
class _Norm:
    """The spec of a stock norm, the value of every entry of its gain before training, and its number of features."""

    spec: NormSpec
    gain: float | None
    features: int | None
    is_declared: bool


def _norms(stock: Any) -> dict[str, _Norm]:
    """The norms among the modules without modules of their own; alike ones are identified once."""
    # The length of the rows on which a norm without parameters is tried: features of the token embedding.
    width = _SOME_WIDTH
    with suppress(NotImplementedError):
        width = int(getattr(stock.get_input_embeddings(), "embedding_dim", _SOME_WIDTH))
    known: dict[object, _Norm | None] = {}
    found, owners = {}, dict[str, Any]()
    for path, module in stock.named_modules():
        # Each model of transformers inside another one draws its own weights.
        owner = owners[path] = module if hasattr(module, "_init_weights") else owners[path.rpartition(".")[0]]
        if any(module.children()) or not may_be_norm(module):
            continue
        kind = likeness(module), type(owner)
        if kind not in known:
            known[kind] = _identified(stock, owner, module, width)
        if (norm := known[kind]) is not None:
            found[path] = norm
    return found


def _identified(stock: Any, owner: Any, module: nn.Module, width: int) -> _Norm | None:
    shape = next((tuple(parameter.shape) for parameter in module.parameters() if parameter.numel() > 1), (width,))
    spec = _declared_spec(stock, module)
    is_declared = spec is not None
    # Activations, projections and position codes run here too, on inputs that they may not expect.
    try:
        seen = None if is_declared else examine(module, (2, *shape))
        spec = spec if seen is None else seen.passport.spec
        if spec is None:
            return None
        fresh = copy.deepcopy(module).to_empty(device="cpu")
        owner._init_weights(fresh)
    except Exception:
        return None
    parameters = dict(fresh.named_parameters())
    weight = seen.affine.of(fresh)[0] if seen is not None else parameters.get("weight")
    if weight is None:
        return _Norm(spec, None, None, is_declared)
    gain = reference.effective_weight(weight, spec, torch.float32).flatten()
    # The shape of the parameters tells the features of a row where its axes are trailing ones.
    trailing = spec.rows.num_trailing
    features = None if trailing is None or spec.rows.groups > 1 else math.prod(shape[-trailing:])
    return _Norm(spec, float(gain[0]) if bool((gain == gain[0]).all()) else None, features, is_declared)


def _declared_spec(stock: Any, module: nn.Module) -> NormSpec | None:
    """The spec that is declared for the class of a module, or for the class that it replaces."""
    cls = type(module)
    replaced = stands_for(cls, type(stock).__module__)
    preset = norm_classes.declared().get(replaced or norm_classes.key_of(cls.__module__, cls.__name__))
    known = [value for name, value in vars(module).items() if "eps" in name]
    eps: object = known[0] if len(known) == 1 else ""
    if replaced:
        # The eps that the config of a declared family says.
        eps = ""
        with suppress(ModelError):
            eps = getattr(stock.config, str(declared_family(stock.config.model_type).config.eps), "")
    if preset is None or not isinstance(eps, float | None):
        return None
    # A buffer of that name is a placeholder: FalconMamba's norm without a gain has one.
    has_weight, has_bias = (isinstance(getattr(module, name, None), nn.Parameter) for name in ("weight", "bias"))
    if not has_weight:
        preset = preset.replace(**Gain(is_present=False).conventions())
    spec = preset.replace(eps=eps, has_weight=has_weight, has_bias=has_bias)
    if isinstance(module, nn.GroupNorm):
        return spec.replace(groups=module.num_groups)
    sizes = getattr(module, "normalized_shape", ())
    return spec.replace(axes=tuple(range(-len(sizes), 0))) if len(sizes) > 1 else spec
