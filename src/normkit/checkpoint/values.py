"""The bias of the values of an attention, moved into the bias behind it.

Where the weights of a row sum to one, b_v passes through them unchanged: b_o + W_o b_v, and b_v is zero.
"""

from __future__ import annotations

from torch import Tensor

from normkit.checkpoint.draft import Draft
from normkit.checkpoint.plan import Product, Reference, Rows
from normkit.checkpoint.request import Request
from normkit.models import legality
from normkit.models.graph import Attention


def pass_values(request: Request, draft: Draft) -> None:
    """Draft it for every attention where it is exact."""
    for attention in request.graph.attentions:
        _pass(request, draft, attention)


def _pass(request: Request, draft: Draft, attention: Attention) -> None:
    value, output = attention.value, attention.output
    if value.bias is None:
        return
    rows = _rows(attention, request.source.tensors[output.weight].shape[output.in_axis])
    if not draft.is_touched(value.bias) and not bool((_taken(request.vector(value.bias), rows) != 0).any()):
        return
    if reason := legality.against_value_fold(attention):
        draft.refuse("value", attention.name, reason)
        return
    repeat = attention.heads // attention.kv_heads
    moved = Reference(
        name=value.bias, is_folded=True, rows=rows, heads=attention.kv_heads if repeat > 1 else 0, repeat=repeat
    )
    draft.add(str(output.bias), Product(matrix=output.weight, in_axis=output.in_axis, vector=moved))
    draft.zero(value.bias, rows)


def _rows(attention: Attention, size: int) -> Rows | None:
    """Where the values lie in the bias of their map; `size` is the width of all query heads."""
    head = size // attention.heads
    match attention.layout:
        case "own":
            return None
        case "last":
            return Rows(blocks=1, tail=attention.kv_heads * head)
        case _:
            return Rows(blocks=attention.kv_heads, tail=head)


def _taken(stored: Tensor, rows: Rows | None) -> Tensor:
    return stored if rows is None else stored.view(rows.blocks, -1)[:, -rows.tail :]
