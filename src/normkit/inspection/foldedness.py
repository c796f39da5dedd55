"""The distance of a model from folded and centred, from its weights and the readers and writers of its family."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from normkit.checkpoint.opening import open_model
from normkit.errors import ModelError, NormkitError
from normkit.geometry.gauge import weightless_defect
from normkit.identification.offloading import stored
from normkit.identification.sites import NormSite
from normkit.models.graph import Graph, Linear, Table
from normkit.text import typed_line


@dataclass(frozen=True, kw_only=True)
class NormForm:
    """The distance of one norm from a norm whose gain and bias have been folded into its readers."""

    path: str
    """As the model names it."""
    kind: Literal["layer", "rms"]
    """"layer" subtracts the mean, "rms" does not; as it behaves where it was seen, else as its family has it."""
    gain_defect: float | None
    """Root mean square of gain - 1, the gain as it acts; None without a gain."""
    largest_bias: float | None
    """Largest magnitude in its bias; None without one."""
    readers: tuple[str, ...]
    """The linear maps that read it."""
    reason: str
    """Why gain and bias cannot leave it as the model is; "" where all that reads it are linear maps that may take them.
    """


@dataclass(frozen=True, kw_only=True)
class WriterForm:
    """The distance of one writer from centred: a table, or weight and bias of a linear map."""

    name: str
    """Path of the map, or name of the table."""
    share: float
    """Share of its energy along all-ones, as `normkit.geometry.centred_defect`: 0 centred, near 1 / width at random."""
    vectors: int
    """Vectors of that width in it: rows of a table; inputs of a map, and 1 for its bias."""
    row_mean: float | None
    """Row mean of a table: root mean square over its rows of a row's mean; else None."""
    is_centred: bool
    """In each of its tensors that share is no more than what rounding leaves."""
    reason: str
    """Why it alone cannot be centred as the model is, where its sum can be; else ""."""


@dataclass(frozen=True, kw_only=True)
class SumForm:
    """The distance of a sum that norms read, as the residual stream, from a sum without a mean."""

    name: str
    """As its family calls it."""
    width: int
    """Features of a row; a random tensor has 1 / width of its energy along all-ones."""
    writers: tuple[WriterForm, ...]
    """The terms of the sum, without the outputs of norms."""
    reason: str
    """Why it cannot be centred without changing what the model computes; "" where it can."""


@dataclass(frozen=True, kw_only=True)
class Foldedness:
    """The distance of a model from folded and from centred, from its weights alone."""

    norms: tuple[NormForm, ...]
    """In the order of the model."""
    sums: tuple[SumForm, ...]
    """In the order in which they are read."""
    oddly_centred: tuple[str, ...]
    """Tables and matrices that are centred although an RMSNorm sees their mean, while others that are added to the same
    sum are not: what a tool leaves that centres embeddings whatever reads them."""


# Of 1 / width, the share of a random tensor. A centred one keeps some 3e-6 of it when it is rounded to bfloat16, and
# less in wider dtypes; a random one of 16 vectors is below this once in 10**29.
_ROUNDING = 1e-4
_FEW_VECTORS = 16
_CHUNK = 2**20

Weights: TypeAlias = Mapping[str, Callable[[], Tensor]]
"""The tensors of a state dict, each read when it is looked at, so that one at a time is in memory."""


def foldedness(model: nn.Module, sites: tuple[NormSite, ...]) -> tuple[Foldedness | None, str]:
    """The distance of a model from folded and centred, or None and the reason why it is unknown.

    Args:
        model: Only its weights are looked at, each once.
        sites: Its norms as they behave: a LayerNorm that has become an RMSNorm counts as one.
    """
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return None, f"what reads each norm is declared for classes of transformers, and {type(model).__name__} is none"
    try:
        elsewhere = stored(model)
        graph = open_model(model, elsewhere).graph
        kinds: dict[str, Literal["layer", "rms"]] = {
            site.path: "layer" if site.spec.centring.numerator else "rms" for site in sites
        }
        norms = [dataclasses.replace(norm, kind=kinds.get(norm.name, norm.kind)) for norm in graph.norms]
        graph = dataclasses.replace(graph, norms=tuple(norms))
        held = {name: tensor.detach for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
        weights = held | {name: each.read for name, each in elsewhere.items()}
        forms = []
        for norm in norms:
            gain = None if norm.weight is None else _floating(norm.weight, weights).double() + norm.offset
            bias = None if norm.bias is None else _floating(norm.bias, weights)
            form = NormForm(
                path=norm.name,
                kind=norm.kind,
                # One for each head, where heads have gains of their own.
                gain_defect=None if gain is None else float(weightless_defect(gain.flatten())),
                largest_bias=None if bias is None else float(bias.abs().max()),
                readers=tuple(reader.name for reader in graph.readers(norm.gives)),
                reason=graph.against_folding(norm) or "",
            )
            forms.append(form)
        sums = [_sum(graph, space, weights) for space in graph.spaces]
        odd = tuple(name for _, names in sums for name in names)
        return Foldedness(norms=tuple(forms), sums=tuple(form for form, _ in sums), oddly_centred=odd), ""
    except NormkitError as error:
        return None, str(error)
    # A model that does not fit its config can fail in as many ways as there are models; what was measured of it stands.
    except Exception as error:
        return None, f"its weights could not be read: {typed_line(error)}"


class _Energy(NamedTuple):
    """Sums over a tensor seen as vectors."""

    width: int
    """Features of a vector."""
    vectors: int
    """Number of vectors."""
    along: float
    """Sum over vectors of (sum of the entries)**2."""
    total: float
    """Sum of all squares."""

    @property
    def share(self) -> float:
        """Share of the energy along all-ones."""
        return self.along / (self.width * self.total) if self.total else 0.0

    @property
    def is_centred(self) -> bool:
        """The energy along all-ones is no more than rounding leaves."""
        return self.share * self.width <= _ROUNDING


def _writer(writer: Linear | Table, weights: Weights) -> tuple[_Energy, bool]:
    """Totals of a writer, and whether each of its tensors is centred."""
    if isinstance(writer, Table):
        parts = [_energy(_floating(writer.name, weights), writer.axis)]
    else:
        parts = [_energy(_floating(writer.weight, weights), writer.out_axis)]
        if writer.bias is not None:
            bias = _floating(writer.bias, weights)
            parts.append(_energy(bias, bias.dim() - 1))
    whole = _Energy(
        width=parts[0].width,
        vectors=sum(part.vectors for part in parts),
        along=sum(part.along for part in parts),
        total=sum(part.total for part in parts),
    )
    return whole, all(part.is_centred for part in parts)


def _energy(tensor: Tensor, axis: int) -> _Energy:
    """Read a tensor once, in pieces, in a dtype in which its sums are as good as exact."""
    wide = torch.float32 if tensor.element_size() < 4 else torch.float64
    rows = max(1, _CHUNK // max(1, tensor[:1].numel()))
    total = along = 0.0
    whole: Tensor | None = None
    for start in range(0, tensor.shape[0], rows):
        values = tensor[start : start + rows].to(wide)
        total += float(values.square().sum())
        sums = values.sum(axis).double()
        if axis == 0:
            whole = sums if whole is None else whole + sums
        else:
            along += float(sums.square().sum())
    if whole is not None:
        along = float(whole.square().sum())
    width = tensor.shape[axis]
    return _Energy(width=width, vectors=tensor.numel() // max(1, width), along=along, total=total)


def _sum(graph: Graph, space: str, weights: Weights) -> tuple[SumForm, list[str]]:
    """A sum, and what is oddly centred there."""
    reason = graph.against_centring(space) or ""
    width, forms, telling = graph.width, [], []
    for writer in graph.writers(space):
        energy, is_centred = _writer(writer, weights)
        width = energy.width
        rows = math.sqrt(energy.along / energy.vectors) / width if isinstance(writer, Table) else None
        alone = "" if reason else graph.against_centring_writer(writer) or ""
        form = WriterForm(
            name=writer.name,
            share=energy.share,
            vectors=energy.vectors,
            row_mean=rows,
            is_centred=is_centred,
            reason=alone,
        )
        forms.append(form)
        # Zeros are what an initialisation leaves, and few vectors can be centred by chance.
        if energy.total and energy.vectors >= _FEW_VECTORS:
            telling.append(form)
    sees_mean = any(norm.kind == "rms" for norm in graph.norms_of(space))
    odd = [form.name for form in telling if form.is_centred and sees_mean]
    # Where all is centred a LayerNorm may have become an RMSNorm: that is exact. Norms add a mean of their own.
    if len(odd) == len(telling) and not graph.added(space):
        odd = []
    return SumForm(name=space, width=width, writers=tuple(forms), reason=reason), odd


def _floating(name: str, weights: Weights) -> Tensor:
    """A tensor of the state dict.

    Raises:
        ModelError: If it holds codes, as of a quantized model.
    """
    tensor = weights[name]()
    if not tensor.is_floating_point():
        raise ModelError(f"{name} is {tensor.dtype}: what a quantized model computes does not show in its tensors")
    return tensor
