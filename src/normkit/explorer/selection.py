"""Which norms of a model a page can draw, what each of them reads, and which block it is in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from normkit.errors import InputError, SpecError
from normkit.explorer.conventions import Convention, convention_of
from normkit.identification.sites import NormSite, OtherNorm, chosen
from normkit.identification.tracing import Trace
from normkit.measurement.layout import BlockCall, block_of
from normkit.measurement.running import Batch
from normkit.measurement.sampling import evenly
from normkit.text import shortened

DECODER = "decoder_"
"""The names of a decoder's arguments begin with it."""

MOST_SITES = 48
"""Norms of a page; with more, each would have too few points to be a cloud."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Selection:
    """The norms whose rows are gathered."""

    norms: Mapping[NormSite, Convention]
    """The norms in forward order, each with what the page calls it."""
    reasons: Mapping[str, str]
    """Path of each other norm -> why it is not among them."""
    notes: tuple[str, ...]
    """Other remarks, one line each."""


def select(
    name: str,
    found: Sequence[NormSite],
    unrecognised: Sequence[OtherNorm],
    called: Trace,
    pattern: str | None,
) -> Selection:
    """The norms of a model that the page can draw, of those that match a pattern: up to 48, spread evenly.

    Args:
        name: Of the model.
        found: Its norms, in forward order.
        unrecognised: The modules that normalize as no spec describes.
        called: The trace in which they were found.
        pattern: Of paths, or None for all.

    Raises:
        InputError: If no norm of the model matches, or none that does can be drawn.
    """
    reasons = {other.path: other.reason for other in unrecognised}
    known = [*(site.path for site in found), *reasons]
    if not known:
        raise InputError(f"{name} has no norms: there is nothing to draw")
    wanted = chosen(known, pattern, name)
    dtypes = {call.order: call.input_dtype for call in called.modules}
    dtypes |= {call.order: call.input_dtype for call in called.functions}
    norms: dict[NormSite, Convention] = {}
    for site in found:
        if any(not bool(part.isfinite().all()) for part in (site.gain, site.bias) if part is not None):
            reasons[site.path] = "its gain or bias holds NaN or infinity"
            continue
        try:
            norms[site] = convention_of(site.spec, site.shape[0], dtypes[site.order])
        except SpecError as error:
            reasons[site.path] = str(error)
    norms = {site: made for site, made in norms.items() if site.path in wanted}
    reasons = {path: why for path, why in reasons.items() if path in wanted}
    if not norms:
        raise InputError(f"{name} has no norm that the page can draw: {' '.join(left_out(reasons))}")
    notes: tuple[str, ...] = ()
    if len(norms) > MOST_SITES:
        notes = (f"{MOST_SITES} of {len(norms)} norms are shown, spread evenly over the depth of {name}.",)
        kept = list(norms)
        norms = {kept[index]: norms[kept[index]] for index in evenly(len(kept), MOST_SITES).tolist()}
    return Selection(norms=norms, reasons=reasons, notes=notes)


def left_out(reasons: Mapping[str, str]) -> list[str]:
    """One sentence per reason, with the paths that it applies to."""
    return [
        f"{shortened(paths)} {'is' if len(paths) == 1 else 'are'} left out: {why}." for why, paths in grouped(reasons)
    ]


def grouped(reasons: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Each reason once, with its paths."""
    paths: dict[str, list[str]] = {}
    for path, why in reasons.items():
        paths.setdefault(why, []).append(path)
    return list(paths.items())


def telling(batch: Batch) -> Batch:
    """A batch in which a decoder reads one token less than the encoder, so that the shapes of their norms differ."""
    decoders = (f"{DECODER}input_ids", f"{DECODER}attention_mask")
    return {key: value[:, : max(value.shape[1] - 1, 1)] if key in decoders else value for key, value in batch.items()}


def by_stream(chosen: Iterable[NormSite], called: Trace, batch: Batch) -> dict[str, list[NormSite]]:
    """The norms by what they read, in a trace of such a batch.

    The keys begin the names of the arguments: "", or "decoder_" of an encoder-decoder.
    """
    if f"{DECODER}input_ids" not in batch:
        return {"": list(chosen)}
    encoded = batch["input_ids"].shape[1] if "input_ids" in batch else None
    decoded = batch[f"{DECODER}input_ids"].shape[1]
    shapes = {call.order: call.input_shape for call in called.modules}
    shapes |= {call.order: call.input_shape for call in called.functions}
    streams: dict[str, list[NormSite]] = {"": [], DECODER: []}
    for site in chosen:
        leading = shapes[site.order][:-1]
        streams[DECODER if decoded in leading and encoded not in leading else ""].append(site)
    return {prefix: sites for prefix, sites in streams.items() if sites}


class Places:
    """The blocks that the norms of a model are in.

    Args:
        found: All its norms, in forward order.
        blocks: Its blocks.
    """

    def __init__(self, found: Sequence[NormSite], blocks: Sequence[BlockCall]) -> None:
        self._layers: dict[str, int] = {}
        leading: dict[int, NormSite] = {}
        begun = 0
        for site in found:
            block = block_of(site.parent, blocks)
            layer = begun if block is None else block
            begun = max(begun, 0 if block is None else block + 1)
            self._layers[site.path] = layer
            if begun:
                leading.setdefault(layer, site)
        width = next(iter(leading.values())).shape if leading else None
        self._leading = {site.path for site in leading.values() if site.shape == width}

    def layer(self, path: str) -> int:
        """The block that a norm is in, from 0; for a norm outside, the number of blocks with a norm before it."""
        return self._layers[path]

    def leads(self, path: str) -> bool:
        """Whether it is the first norm of its block or after the last one, and as wide as the first of these norms."""
        return path in self._leading
