"""`compare`: a port against its reference, at each level that both of them offer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from normkit import demo
from normkit.checkpoint.build_model import quiet_libraries
from normkit.checkpoint.loading import LoadedModel
from normkit.comparison.differences import Comparison
from normkit.comparison.side_by_side import Progress, compare_models
from normkit.comparison.sides import Side, open_side
from normkit.errors import InputError
from normkit.identification.book import PassportBook
from normkit.measurement.texts import Batches, batches_for, check_runs

_TOKENS = 512


def compare(
    port: nn.Module | PassportBook | str | Any,
    reference: nn.Module | PassportBook | str | Any,
    batches: Any = None,
    *,
    site: str | None = None,
    dtype: str = "auto",
    local_files_only: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Compare a port with its reference, at each level that both offer.

    Norms are paired by path, or by forward order and size where the paths differ. Each pair is reported with the
    conventions that differ, and the distance of the two formulas on the rows that arrive at the port's norm. Then both
    run on the first batch, and their first difference is found. Models run in evaluation mode and are left as they
    were.

    Args:
        port: A model of torch, the folder or Hub id of one, its passports or their file.
        reference: Likewise.
        batches: As for `inspect`; by default the start of a text that ships, for models from folders.
        site: List only the norms, of either, whose path this is or matches, as "model.layers.*.input_layernorm" does.
        dtype: In which models from folders are loaded: "auto" (the checkpoint's own), "float32", "bfloat16", "float16"
            or "float64".
        local_files_only: Do not use the network: take a Hub id from the cache.
        progress: Called with a stage's name, the steps done and the steps in all (0: unknown).

    Returns:
        One part for each level, or the reason why it was not looked at.

    Raises:
        InputError: If a file cannot be used, `site` matches no norm, or batches are needed.
        ModelError: If a model cannot be loaded or run.
        KindError: If one of them is nothing that can be compared.

    Example:
        >>> port = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8, eps=1e-3))
        >>> stock = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        >>> found = compare(port, stock, {"input": torch.randn(2, 4)})
        >>> found.differs, found.conventions.changed[0].changes[0].given
        (True, {'eps': 0.001, 'eps_placement': 'inside'})
    """
    report = progress or (lambda _stage, _done, _total: None)
    sides = [open_side(given, dtype=dtype, local_files_only=local_files_only) for given in (port, reference)]
    return compare_sides(sides[0], sides[1], batches, site=site, progress=report)


def compare_sides(
    port: Side,
    reference: Side,
    batches: Any | Callable[[LoadedModel], Batches],
    *,
    site: str | None = None,
    progress: Progress,
) -> Comparison:
    """`compare` of two sides that are open; `batches` may be a function from a loaded model to them."""
    source = ""
    if port.loaded is not None and (batches is None or callable(batches)):
        chosen = (batches or shipped)(port.loaded)
        batches, source = chosen.batches, chosen.source
        check_runs(port.loaded.model, chosen.batches[0])
    # Their own names, else those that the user gave.
    pairs = ((port.name, reference.name), (port.given, reference.given), ("port", "reference"))
    names = next(pair for pair in pairs if pair[0] != pair[1])
    if port.model is None:
        raise InputError(f"{names[0]} holds passports, and the port must be a model; give it in place of the reference")
    if batches is None:
        raise InputError("expected batches to run the models on, got none; give batches=")
    other = reference.model if reference.model is not None else reference.book
    assert other is not None
    with quiet_libraries():
        conventions, rows = compare_models(
            port.model, other, batches, name=names[0], reference_name=names[1], site=site, progress=progress
        )
    return Comparison(
        port=names[0],
        reference=names[1],
        forms=(port.form, reference.form),
        source=source,
        conventions=conventions,
        rows=rows,
    )


def shipped(loaded: LoadedModel) -> Batches:
    """The start of the text that ships, for a model from a folder."""
    return batches_for(
        loaded, demo.text(), "demo text", is_own=False, length=None, max_tokens=_TOKENS, batch_size=_TOKENS
    )
