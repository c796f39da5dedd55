"""The norms of one side of a comparison: their passports, the gains and biases that act, and the rows of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from normkit.comparison.recording import Recording
from normkit.comparison.torch_recorder import recorded
from normkit.errors import ModelError, NormkitError
from normkit.identification.book import PassportBook
from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace
from normkit.measurement.running import Batch, evaluating, first_tokens, fitted, name_of_ids, runner, vocabulary
from normkit.text import first_line

Acting = tuple[Tensor | None, Tensor | None]
"""The gain of a norm, its offset included, and its bias; in float64, None where there is none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Survey:
    """The norms of one side."""

    book: PassportBook
    """Their passports."""
    acting: Mapping[str, Acting] = field(default_factory=dict)
    """Path -> gain and bias, of the norms whose numbers are at hand."""


def survey_model(model: nn.Module, batch: Batch, name: str) -> Survey:
    """The norms of a model that is called on the first few tokens of a batch, whichever tokens it has.

    Raises:
        ModelError: If it cannot be run.
        InputError: If it takes no such arguments.
    """
    size, ids, small = vocabulary(model), name_of_ids(batch), first_tokens(batch)
    known = {key: value.remainder(size) if size and key == ids else value for key, value in small.items()}
    try:
        with torch.no_grad(), evaluating(model):
            sites, left_out = find_sites(model, trace(model, runner(model, fitted(model, known))))
    except NormkitError:
        raise
    except Exception as error:  # whatever the model's own code raises
        raise ModelError(
            f"{name} cannot be run on this input ({first_line(error)}); give a batch that both models take"
        ) from error
    return Survey(
        book=PassportBook.of(name, sites, left_out),
        acting={site.path: (_flat(site.gain), _flat(site.bias)) for site in sites},
    )


def survey_book(book: PassportBook) -> Survey:
    """The norms of passports; those of a file say nothing of the numbers."""
    acting = {}
    for entry in book.entries:
        spec, weight, bias = entry.passport.spec, entry.passport.weight, entry.passport.bias
        if spec is None or (spec.has_weight and weight is None) or (spec.has_bias and bias is None):
            continue
        gain = spec.gain.effective(weight, torch.float64) if spec.has_weight and weight is not None else None
        acting[entry.path] = (_flat(gain), _flat(bias) if spec.has_bias else None)
    return Survey(book=book, acting=acting)


def run_model(
    model: nn.Module, batch: Batch, spans: Mapping[str, int | None], *, rows: int, name: str
) -> Recording | str:
    """What enters and leaves the norms of a model on a batch, or why it could not be run.

    Raises:
        InputError: If it takes no such arguments, or calls no norm.
    """
    size, ids = vocabulary(model), name_of_ids(batch)
    highest = 0 if ids is None else int(batch[ids].max())
    if size is not None and highest >= size:
        return f"{name} embeds {size:,} tokens, and the text has token {highest:,}"
    try:
        return recorded(model, batch, rows=rows, name=name, spans=spans)
    except NormkitError:
        raise
    except Exception as error:  # whatever the model's own code raises
        return f"{name} cannot be run on this input ({first_line(error)})"


def _flat(part: Tensor | None) -> Tensor | None:
    return None if part is None else part.detach().cpu().double().flatten()
