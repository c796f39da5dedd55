"""The places of two recordings that stand for each other: paired norms, call by call, with rows in the same order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normkit.comparison.effects import distances
from normkit.comparison.pairing import MatchedBy, match
from normkit.comparison.recording import RecordedNorm, Recording
from normkit.identification.book import Entry, PassportBook
from normkit.identification.passport import Passport

_OTHER_ORDER = 0.5
"""Rows of the same token that are this far apart may be rows of other tokens."""
_BEFORE_ATTENTION = (
    r"input_layernorm|ln_?1|norm_?1|attn_norm|attention_norm|self_attn_layer_norm|attention_layernorm|pre_attention\w*"
)
_OF_HEADS = r"(q|k|query|key)_?(layer)?norm"
_BEFORE_MLP = r"post_attention_layernorm|ln_?2|norm_?2|ffn_norm|mlp_norm|pre_(feedforward|mlp)\w*|final_layer_norm"
_BEHIND_BLOCK = r"post_(attention|feedforward|ffw|attn|mlp)\w*"
"""Names of norms in transformers, MLX, llama.cpp and vLLM, by the block that they stand before or behind."""

Tokens = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """One call of a norm, as both recorded it."""

    path: str
    """The port's norm; with "#2" for its second call in a run."""
    reference: str
    """The reference's norm, likewise."""
    matched_by: MatchedBy
    """The norms were paired by "path", or by "order": what they hold, their order and size."""
    port_rows: tuple[Tensor, Tensor]
    """The rows that the port normalized there, and those that left, in the reference's order."""
    reference_rows: tuple[Tensor, Tensor]
    """The same of the reference."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """The paired places, in the order of the calls, and the norms without a counterpart."""

    pairs: tuple[Place, ...]
    turn: Mapping[str, int]
    """The reference's norm -> its place in the order of the calls."""
    only_port: tuple[str, ...]
    only_reference: tuple[str, ...]


def paired(port: Recording, reference: Recording) -> Places:
    """Pair the calls of the norms of two recordings: by path, else by what they hold, by order and size."""
    here, there = calls_of(port, reference.order), calls_of(reference, port.order)
    matches = match(_as_book(here), _as_book(there))
    tokens = port.tokens if port.tokens == reference.tokens else ()
    pairs = []
    for each in matches:
        path, other = each.entry.path, each.reference.path
        x, y = here[path].normalized, here[path].output
        x0, y0 = there[other].normalized, there[other].output
        if x[0].numel() != x0[0].numel():
            continue
        if x.shape[1:] != x0.shape[1:]:
            # The reference's formula is for rows as the reference's are.
            x, y = (rows.reshape(-1, *x0.shape[1:]) for rows in (x, y))
        order = _order(x, x0, tokens)
        count = min(len(order), len(x0))
        pairs.append(
            Place(
                path=path,
                reference=other,
                matched_by=each.matched_by,
                port_rows=(x[order][:count], y[order][:count]),
                reference_rows=(x0[:count], y0[:count]),
            )
        )
    turn = {path: number for number, path in enumerate(there)}
    pairs.sort(key=lambda place: turn[place.reference])
    # Norms of one path and of different sizes are no places, and have their counterparts.
    paths, others = {each.entry.path for each in matches}, {each.reference.path for each in matches}
    return Places(
        pairs=tuple(pairs),
        turn=turn,
        only_port=tuple(path for path in here if path not in paths),
        only_reference=tuple(path for path in there if path not in others),
    )


def calls_of(recording: Recording, other_order: Sequence[str] = ()) -> dict[str, RecordedNorm]:
    """The norms call by call in the order of the calls: a norm that a run calls twice is two, "path" and "path#2".

    Args:
        recording: The recording.
        other_order: Order of another recording, which holds where this one has none and the paths are the same.
    """
    order = recording.order
    if not order and set(other_order) == set(recording.norms):
        order = tuple(dict.fromkeys(other_order))
    counts, seen = Counter(order), Counter[str]()
    found: dict[str, RecordedNorm] = {}
    for path in (*order, *(path for path in recording.norms if path not in counts)):
        norm, times, number = recording.norms[path], counts[path], seen[path]
        seen[path] += 1
        if times > 1:
            if len(norm.calls) % times:
                # Not all rows of the later calls were kept.
                times = len(norm.calls)
            if number >= len(norm.calls):
                continue
            norm = _call(norm, number, times)
        found[f"{path}#{number + 1}" if number else path] = norm
    return found


def _call(norm: RecordedNorm, number: int, times: int) -> RecordedNorm:
    """The rows of one of the calls that every run makes."""

    def rows(part: Tensor) -> Tensor:
        return torch.cat(torch.split(part, list(norm.calls))[number::times])

    return replace(
        norm,
        input=rows(norm.input),
        output=rows(norm.output),
        residual=None if norm.residual is None else rows(norm.residual),
        calls=norm.calls[number::times],
    )


def _as_book(norms: Mapping[str, RecordedNorm]) -> PassportBook:
    """The norms as `match` takes them."""
    entries = (
        Entry(
            path=path,
            class_name="recorded",
            features=norm.input[0].numel(),
            passport=Passport(verdict="norm", spec=None, readings={}, weight=norm.weight, bias=norm.bias),
        )
        for path, norm in norms.items()
    )
    return PassportBook(model="", entries=tuple(entries), left_out={})


def _order(x: Tensor, expected: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """The order of the port's rows that makes them those of the reference: heads may stand before tokens."""
    as_recorded = torch.arange(len(x))
    total = sum(map(len, tokens))
    if len(x) != len(expected) or not total or len(x) <= total or len(x) % total:
        return as_recorded
    orders = [as_recorded, *_other_orders(len(x), [len(row) for row in tokens])]
    apart = [float(distances(x[order], expected).mean()) for order in orders]
    return as_recorded if apart[0] < _OTHER_ORDER else orders[apart.index(min(apart))]


def _other_orders(count: int, lengths: Sequence[int]) -> Iterator[Tensor]:
    """The rows of one token after another, if they stand as (H, T), or (B, H, T); or as (T, H), and the others do."""
    heads, total = count // sum(lengths), sum(lengths)
    numbers = torch.arange(count)
    for sizes in ([total], lengths):
        parts = torch.split(numbers, [size * heads for size in sizes])
        yield torch.cat([part.view(heads, -1).T.flatten() for part in parts])
        yield torch.cat([part.view(-1, heads).T.flatten() for part in parts])


def is_of_heads(path: str) -> bool:
    """Whether a norm is one of queries or keys, by its name."""
    return re.fullmatch(_OF_HEADS, _last(path)) is not None


def block_between(since: str, path: str) -> str:
    """The part between two norms, by their names; "" if these do not say."""
    last, following = _last(since), _last(path)
    if is_of_heads(since) or re.fullmatch(_BEFORE_ATTENTION, last):
        return "attention"
    # A norm named after attention stands behind it in a Gemma, and before the MLP in a Llama.
    is_behind = last != "post_attention_layernorm" or "feedforward" in following
    if re.fullmatch(_BEHIND_BLOCK, last) and is_behind:
        return "residual sum"
    return "MLP" if re.fullmatch(_BEFORE_MLP, last) else ""


def _last(path: str) -> str:
    return re.split(r"[.:]", path)[-1].partition("#")[0]


def other_text(given: Tokens, expected: Tokens) -> str:
    """Why two recordings are of other tokens; "" if they are of the same, or one does not say."""
    here, there = ([token for row in rows for token in row] for rows in (given, expected))
    count = min(len(here), len(there))
    if here[:count] == there[:count]:
        return ""
    first = next(place for place in range(count) if here[place] != there[place])
    told = f"token {first + 1} is {here[first]} in the port and {there[first]} in the reference"
    for owner, longer, shorter in (("reference", there, here), ("port", here, there)):
        if longer[1:9] == shorter[:8]:
            told = f"the {owner} begins with token {longer[0]}, the other does not"
    return f"the rows are of other tokens: {told}; record both on the same ids"


def first_tokens(tokens: Tokens, count: int) -> Tensor:
    """True for each of so many rows that is of a text's first token; of none if the tokens do not tell."""
    first = torch.tensor([place == 0 for row in tokens for place in range(len(row))], dtype=torch.bool)
    if not len(first) or count % len(first):
        return torch.zeros(count, dtype=torch.bool)
    return first.repeat_interleave(count // len(first))
