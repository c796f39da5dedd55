"""Where the gain and the bias of one norm go: into all its readers, or nowhere.

    W (g * z + b) + c = (W diag(g)) z + (c + W b)

A bias whose readers cannot all take it stays in the norm as b / g; a coordinate with g = 0 and b != 0 stays as it is.
"""

from __future__ import annotations

from torch import Tensor

from normkit.checkpoint.draft import Draft
from normkit.checkpoint.plan import Constant, Fate, Gain, NormChange, Operation, Product, Quotient, Reference
from normkit.checkpoint.request import Request
from normkit.models import legality
from normkit.models.graph import Linear, Norm


def move_affine(request: Request, draft: Draft, norm: Norm) -> NormChange:
    """Draft what becomes of the gain and the bias of a norm, and say it."""
    readers = request.graph.readers(norm.gives)
    gain, bias = request.gain(norm), request.bias(norm)
    wanted_gain, wanted_bias, reasons = _wanted(request, draft, norm, readers)
    has_gain, has_bias = gain is not None and bool((gain != 1).any()), bias is not None and bool((bias != 0).any())
    lacking = [reader.name for reader in readers if not _takes_bias(request, reader)]
    folds_bias = wanted_bias and has_bias and not lacking
    kept = _kept(gain, bias) if wanted_gain and not folds_bias else ()
    moves_gain = wanted_gain and gain is not None and _is_moved(gain, kept)
    if moves_gain:
        _fold_gain(draft, norm, readers, kept, divides=has_bias and not folds_bias)
    if folds_bias:
        _fold_bias(request, draft, norm, readers)
    if wanted_bias and has_bias and lacking:
        stays = "stays in the norm, divided by the gain" if moves_gain else "stays in the norm"
        reasons.append(f"its bias {stays}, as {', '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} none")
    return NormChange(
        name=norm.name,
        gain=_fate(gain, has_gain, "folded" if moves_gain else None),
        bias=_fate(bias, has_bias, "folded" if folds_bias else "divided" if has_bias and moves_gain else None),
        readers=tuple(reader.name for reader in readers) if moves_gain or folds_bias else (),
        kept=kept,
        reasons=tuple(reasons),
    )


def _wanted(request: Request, draft: Draft, norm: Norm, readers: tuple[Linear, ...]) -> tuple[bool, bool, list[str]]:
    """Whether gain and bias are asked for and may leave, and why not."""
    is_final = any(reader.is_head for reader in readers)
    gain_operation: Operation = "final" if is_final else "gain"
    bias_operation: Operation = "final" if is_final else "bias"
    gain, bias = request.gain(norm), request.bias(norm)
    has_any = (gain is not None and bool((gain != 1).any())) or (bias is not None and bool((bias != 0).any()))
    wants_gain = gain is not None and gain_operation in request.operations
    wants_bias = bias is not None and bias_operation in request.operations
    operation = gain_operation if wants_gain else bias_operation
    if not (wants_gain or wants_bias) or not has_any:
        return wants_gain, wants_bias, []
    reason = legality.against_folding(request.graph, norm, untie=request.untie)
    if reason is None:
        return wants_gain, wants_bias, []
    draft.refuse(operation, norm.name, reason)
    return False, False, [reason]


def _takes_bias(request: Request, reader: Linear) -> bool:
    return reader.bias is not None or legality.ignores_key_bias(request.graph, reader)


def _kept(gain: Tensor | None, bias: Tensor | None) -> tuple[int, ...]:
    """Coordinates whose bias no division by the gain can carry."""
    if gain is None or bias is None:
        return ()
    return tuple(int(index) for index in ((gain == 0) & (bias != 0)).nonzero().flatten())


def _is_moved(gain: Tensor, kept: tuple[int, ...]) -> bool:
    """Whether any factor is not 1; that of a kept coordinate is."""
    factors = gain.clone()
    factors[list(kept)] = 1.0
    return bool((factors != 1).any())


def _fold_gain(draft: Draft, norm: Norm, readers: tuple[Linear, ...], kept: tuple[int, ...], *, divides: bool) -> None:
    gain = Gain(weight=str(norm.weight), offset=norm.offset, kept=kept)
    for reader in readers:
        draft.multiply(reader.weight, reader.in_axis, gain)
    draft.set_vector(gain.weight, Constant(value=1.0 - norm.offset, kept=kept))
    if divides:
        draft.set_vector(str(norm.bias), Quotient(gain=gain))


def _fold_bias(request: Request, draft: Draft, norm: Norm, readers: tuple[Linear, ...]) -> None:
    bias = str(norm.bias)
    for reader in readers:
        if reader.bias is not None:
            matrix = reader.weight if reader.weight in request.source.tensors else str(reader.tied_to)
            draft.add(reader.bias, Product(matrix=matrix, in_axis=reader.in_axis, vector=Reference(name=bias)))
    draft.set_vector(bias, Constant(value=0.0))


def _fate(vector: Tensor | None, is_there: bool, moved: Fate | None) -> Fate:
    if vector is None:
        return "none"
    return moved or ("left" if is_there else "identity")
