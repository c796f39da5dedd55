"""Batch norms of a checkpoint on disk: which are folded into which tensors, decided without reading a matrix.

The class that the configuration names is built without values and run once; its batch norms are read from the file. No
stock class lacks its batch norms, so a folded one stays, with mean 0, variance 1 - eps and gain 1: y = x + bias. In
float32 torch then computes 1 / sqrt(variance + eps) as 1; in the reals it is within 2^-26 of 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normkit.checkpoint.batch_norms import IN_EVALUATION
from normkit.checkpoint.build_model import quiet_libraries
from normkit.checkpoint.channel_maps import TRANSPOSED, affine
from normkit.checkpoint.norm_neighbours import batch_norms_of, beside_norms, run_of
from normkit.checkpoint.opening import OpenedFolder, model_class
from normkit.checkpoint.plan import BatchNorm, Constant, NormChange, Product, Refusal, Shift
from normkit.checkpoint.plan_builder import PlanBuilder
from normkit.checkpoint.reader import TORCH, found, vector
from normkit.errors import InputError, ModelError
from normkit.text import dtype_name, typed_line

REMARKS = (
    IN_EVALUATION,
    "a folded batch norm stays in the file as y = x + bias, so that its class loads it; nk.fold takes it out of the "
    "loaded model",
)
_VECTORS = {"weight": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}


def fold_batch_norms(
    opened: OpenedFolder, builder: PlanBuilder, dtype: str
) -> tuple[tuple[NormChange, ...], tuple[Refusal, ...]]:
    """Decide what becomes of each batch norm of a checkpoint on disk, and of the tensors beside it.

    Raises:
        InputError: If its class has no batch norm, or does not run without values.
        ModelError: If transformers cannot build the class, or the file lacks a tensor of a norm or of a map.
    """
    source, model = opened.source, empty_model(opened.config, opened.folder)
    batch_norms_of(model)
    try:
        _, seen = run_of(model, None)
    except InputError:
        # Some classes make tensors on the CPU while they run. Random values do as well; they take memory.
        model = empty_model(opened.config, opened.folder, device="cpu")
        _, seen = run_of(model, None)
    norms = batch_norms_of(model)
    named: dict[str, BatchNorm] = {}
    for path, norm in norms.items():
        names = {part: f"{path}.{name}" for part, name in _VECTORS.items() if getattr(norm, name) is not None}
        for part, name in names.items():
            setattr(norm, _VECTORS[part], nn.Parameter(vector(source, name), requires_grad=False))
        if {"mean", "var"} <= names.keys():
            named[path] = BatchNorm(
                weight=names.get("weight"), bias=names.get("bias"), mean=names["mean"], var=names["var"], eps=norm.eps
            )

    taken: set[str] = set()

    def take(path: str, module: Any, taker: str, layer: Any, is_after: bool) -> NormChange | str:
        norm, weight, bias = named[path], f"{taker}.weight", f"{taker}.bias" if layer.bias is not None else None
        stored = {found(source, name).dtype for name in (weight, norm.var)}
        narrow = sorted(stored & {"F16", "BF16"}) if dtype == "same" else []
        is_transposed = isinstance(layer, TRANSPOSED)
        has_groups = getattr(layer, "groups", 1) != 1
        by, kept = affine(module), 1 - norm.eps
        has_shift = bool((by.shift != 0).any())
        if narrow:
            given = dtype_name(TORCH[narrow[0]])
            return (
                f"{given} holds neither a variance of 1 - eps nor small scales near enough; fold with --dtype float32"
            )
        if weight in taken:
            return f"{taker} takes another norm, and on disk a map takes one"
        if is_transposed and is_after:
            return f"{taker} is transposed, and on disk it takes no norm before it"
        if has_groups and (is_after or is_transposed):
            return f"{taker} has groups, and on disk its inputs are not scaled group by group"
        if bias is None and has_shift and (is_after or norm.bias is None):
            return f"{taker} has no bias for its shift, and its class makes none"
        bare = torch.full_like(module.running_var, kept).to(TORCH[source.tensors[norm.var].dtype]).double()
        is_bare = torch.equal(module.running_var.double(), bare) and not bool((module.running_mean != 0).any())
        if is_bare and (module.weight is None or bool((module.weight == 1).all())) and not (bias and has_shift):
            # Folded before.
            return NormChange(name=path, gain="identity", bias="shift" if has_shift else "identity")
        taken.add(weight)
        builder.multiply(weight, int(is_after is not is_transposed), norm)
        if bias and is_after:
            builder.add(bias, Product(matrix=weight, in_axis=1, vector=norm))
        elif bias:
            builder.set_vector(bias, Shift(norm=norm, added=bias))
        if norm.bias:
            builder.set_vector(norm.bias, Constant(value=0.0) if bias or is_after else Shift(norm=norm, added=None))
        if norm.weight:
            builder.set_vector(norm.weight, Constant(value=1.0))
        builder.set_vector(norm.mean, Constant(value=0.0))
        builder.set_vector(norm.var, Constant(value=kept))
        return NormChange(name=path, gain="folded", bias="folded" if bias else "shift", readers=(taker,))

    return beside_norms(model, seen, take)


def empty_model(values: Mapping[str, Any], folder: Path, *, device: str = "meta") -> nn.Module:
    """A model of the class that a configuration names, in evaluation mode; without values on the meta device.

    Raises:
        ModelError: If transformers does not know or cannot build it.
    """
    config, class_ = model_class(dict(values), folder)
    try:
        with quiet_libraries(), torch.device(device), torch.random.fork_rng(devices=[]):
            model: nn.Module = class_(config).eval()
    except Exception as error:  # a configuration can fail in as many ways as there are models
        raise ModelError(f"transformers cannot build {class_.__name__}: {typed_line(error)}") from error
    return model
