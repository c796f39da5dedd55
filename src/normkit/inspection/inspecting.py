"""`inspect`: a model and some batches in, an `Inspection` out. It only composes the parts of this folder."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.errors import InputError
from normkit.identification.offloading import gathered, parameters
from normkit.identification.sharding import local
from normkit.identification.side_by_side import side_by_side
from normkit.identification.sites import chosen
from normkit.inspection.first_text import KeySelection, TokenRow, key_selections
from normkit.inspection.foldedness import foldedness
from normkit.inspection.result import Inspection, facts_of, infer, judged
from normkit.measurement import baseline
from normkit.measurement.baseline import Baseline
from normkit.measurement.batch_norms import DataStatistics
from normkit.measurement.hooks import observed
from normkit.measurement.intent import stock_intent
from normkit.measurement.layout import block_of
from normkit.measurement.modes import change_of_modes
from normkit.measurement.modulation import find_modulations
from normkit.measurement.patches import find_shared, patches
from normkit.measurement.row_leakage import find_leaks
from normkit.measurement.running import (
    Batch,
    arguments,
    batches_of,
    evaluating,
    first_of,
    first_tokens,
    name_of_ids,
    row_name,
    rows,
    runner,
    token_ids,
    token_mask,
    unit,
    vocabulary,
)
from normkit.measurement.sampling import Probe
from normkit.measurement.structure import Progress, Structure, survey
from normkit.measurement.weights import gradient_errors, row_scatter
from normkit.text import dtype_name

# Logits that are made float32 at a time: 64 MB.
_MOST_LOGITS = 2**24
# Machine epsilons of the largest logit: unchanged logits differ if a kernel groups its rows by their content.
_STILL = 4


class NextTokenLoss:
    """Adds up the cross-entropy of each next token, for a model whose logits do not depend on later tokens.

    Causality is tried on a few tokens, not read off the name of the class: a masked language model or an encoder has no
    such loss.
    """

    def __init__(self, model: nn.Module) -> None:
        self.vocabulary, self._sum, self._count = vocabulary(model) or 0, 0.0, 0
        # Until it is tried, all may be.
        self._is_causal = self.vocabulary > 0

    def try_causality(self, model: nn.Module, few: Batch, output: object) -> None:
        """Run a few tokens once; `output` is what the model, in evaluation mode, returned for them."""
        self._is_causal = self.vocabulary > 0 and self._depends_on_past_only(model, few, output)

    def add(self, batch: Batch, output: object) -> None:
        """Add a batch and the model's output for it; padding does not count."""
        ids, logits = token_ids(batch), self._logits(batch, output)
        if not self._is_causal or ids is None or logits is None:
            return
        mask = token_mask(batch)
        counts = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        kept = (counts[:, 1:] & counts[:, :-1]).to(logits.device)
        targets = ids[:, 1:].to(logits.device)
        many = max(1, _MOST_LOGITS // logits.shape[-1])
        for row, column in product(range(len(ids)), range(0, targets.shape[1], many)):
            part = slice(column, column + many)
            losses = F.cross_entropy(logits[row, :-1][part].float(), targets[row, part], reduction="none")
            losses = losses[kept[row, part]]
            self._sum, self._count = self._sum + float(losses.double().sum()), self._count + len(losses)

    @property
    def value(self) -> float:
        """Mean over tokens in nats; NaN if the model has no such loss."""
        return self._sum / self._count if self._count and self._is_causal else math.nan

    def _depends_on_past_only(self, model: nn.Module, few: Batch, output: object) -> bool:
        """The logits of the first half of the tokens stay the same if the other half changes."""
        name = name_of_ids(few)
        if name is None or (ids := few[name]).shape[1] < 2:
            return False
        half = ids.shape[1] // 2
        changed = torch.cat([ids[:, :half], (ids[:, half:] + 1) % self.vocabulary], dim=1)
        try:
            after = self._logits(few, runner(model, {**few, name: changed})())
        # Any third-party forward runs here, on fewer tokens than it may take.
        except Exception:
            return False
        before = self._logits(few, output)
        if before is None or after is None:
            return False
        moved = (after - before)[:, :half].abs().max()
        return bool(moved <= _STILL * torch.finfo(before.dtype).eps * before.abs().max())

    def _logits(self, batch: Batch, output: object) -> Tensor | None:
        """The logits, of shape (B, T, V) with V the size of the vocabulary; None if the output has none."""
        output = getattr(output, "logits", output)
        logits, ids = output[0] if isinstance(output, tuple) and output else output, token_ids(batch)
        if not isinstance(logits, Tensor) or ids is None or logits.dim() != 3:
            return None
        fits = logits.shape[:2] == ids.shape and logits.shape[2] == self.vocabulary and logits.is_floating_point()
        return logits if fits else None


def inspect(
    model: nn.Module,
    batches: Any,
    *,
    name: str = "",
    source: str = "",
    decode: Callable[[int], str] | None = None,
    site: str | None = None,
    intent: Path | str | Baseline | None = None,
    during: AbstractContextManager[object] | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Find every norm of a model, measure it on real input, and check it against the rules.

    The model runs in evaluation mode without gradients and is left as it was, also after an exception.
    Statistics are streamed: nothing of the size of an activation is kept. Which keys are selectable is judged on the
    first text alone. Parameters that accelerate offloads are read for each call. Those that `fully_shard` or tensor
    parallelism spreads over processes are gathered for each call, in the dtype in which they are kept: all processes
    must call it with the same batches, and each gets what one process gets of the whole model.

    Args:
        model: A transformer or another network with norms, on any device.
        batches: One batch, or an iterable of them. A batch is a dictionary of keyword arguments, as a tokenizer's
            output is, a tensor, or a tuple of positional arguments, with tensors, numbers, strings, None, and lists,
            tuples and dictionaries of these in it. A list is one batch only inside an iterable, as of a DataLoader.
            Rows are tokens, or what the norms see of images (B, C, H, W) and sound: patches, pixels, channels, frames.
            Where there is an "attention_mask" (B, T), tokens with a 0 enter no statistic; rows that are none of its
            tokens, as in a decoder behind a padded encoder, enter all.
        name: Name of the model in the report.
        source: The batches in a few words.
        decode: Token id -> text, for the token walk. With it the tokens count as a text, whose loss is judged.
        site: Path of the norm that the token walk goes through, or a pattern whose first match it is; a norm of the
            middle block by default.
        intent: What the model is meant to be, and is held to; or the file that says so. If there is no such file, it
            is written: from what is found here, and from the stock class of the model's config where there is one.
        during: A context in which the model runs on all batches, and at no other time, such as a
            `checkpoint.ActivationMeter`: what else is to be measured needs no second run.
        progress: Called with a stage's name, the steps done and the steps in all (0: unknown).

    Returns:
        An `Inspection`: sites, blocks, attentions, findings; `write_html` and `to_json` of it.

    Raises:
        InputError: If there is no batch or one that cannot be taken, `site` is no norm of the model, or the intent file
            cannot be used.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> inspect(model, {"input": torch.randn(2, 5, 8)}).sites[0].path
        '1'
    """
    with gathered(model):
        return _inspected(
            model,
            batches,
            name=name,
            source=source,
            decode=decode,
            site=site,
            intent=intent,
            during=during or nullcontext(),
            progress=progress,
        )


def _inspected(
    model: nn.Module,
    batches: Any,
    *,
    name: str,
    source: str,
    decode: Callable[[int], str] | None,
    site: str | None,
    intent: Path | str | Baseline | None,
    during: AbstractContextManager[object],
    progress: Progress | None,
) -> Inspection:
    stream = (arguments(model, batch) for batch in batches_of(batches))
    first = next(stream, None)
    if first is None:
        raise InputError("inspect needs at least one batch, got none")
    report = progress or (lambda _stage, _done, _total: None)
    declared, unwritten = baseline.declared(intent)
    with evaluating(model), torch.no_grad():
        few, outputs = first_tokens(first), list[object]()

        def run_few() -> object:
            outputs.append(runner(model, few)())
            return outputs[-1]

        try:
            structure = survey(model, run_few, report)
        # Some models, such as those of sound, take no shorter input, and raise anything; those of images and text at
        # once lose the places of the images.
        except Exception:
            few, outputs = rows(first, 0), []
            try:
                structure = survey(model, run_few, report)
            except Exception:
                few, outputs = dict(first), []
                structure = survey(model, run_few, report)
        # A wrong path is reported before the whole text is run.
        paths = [norm.path for norm in structure.sites]
        path = _middle_site(structure) if site is None else chosen(paths, site, name or "the model")[0]
        baseline.check_fits(declared, paths)
        tokens, padding, seen, counts = 0, 0, set[int](), unit(first)
        # Rows of numbers, without an axis of tokens.
        is_flat = counts == "token" and first_of(first).dim() == 2 and first_of(first).is_floating_point()
        noun = "sample" if is_flat else counts
        loss = NextTokenLoss(model)
        walked = [norm for norm in structure.sites if norm.path == path] if counts == "token" else []
        token = TokenRow(walked[0], first) if walked else None
        layout = structure.layout(is_pooled=False)
        data = DataStatistics(model, structure.others)
        probe = Probe(model, layout)
        selections: list[KeySelection] = []

        def run_text() -> None:
            nonlocal tokens, padding, selections
            with during, probe, observed(model, data.sites, (), (), data):
                for index, batch in enumerate(chain([first], stream)):
                    report("text", index, 0)
                    # The mask of a recording tells its samples, of an image its pixels: a norm has other rows.
                    mask, ids = token_mask(batch) if counts == "token" else None, token_ids(batch)
                    probe.batch(mask, ids)
                    data.batch(batch)
                    with ExitStack() as first_alone:
                        if index == 0:
                            selecting = partial(report, "selectable keys")
                            keys = key_selections(model, structure.called, structure.blocks, first, selecting)
                            selections = first_alone.enter_context(keys)
                            if token is not None:
                                first_alone.enter_context(token.listening(model))
                        loss.add(batch, runner(model, batch)())
                    shape = (1, 1) if mask is None else mask.shape
                    if mask is None and first_of(batch).dim():
                        # A batch of single rows has one token a row.
                        shape = (*first_of(batch).shape, 1)[: 2 if noun == "token" else 1]
                    whole = math.prod(shape)
                    counted = whole if mask is None else int(mask.sum())
                    tokens, padding = tokens + counted, padding + whole - counted
                    if ids is not None and counts == "token":
                        seen.update((ids if mask is None or mask.shape != ids.shape else ids[mask]).flatten().tolist())

        causality = partial(loss.try_causality, model, few, outputs[0])
        # With weights in files, the text does not wait for the answer of the other run.
        texted, tried = side_by_side(model, structure.block_modules, (run_text, causality))
        tried()
        texted()
        outputs.clear()
        measured = probe.measured(decode)
        dtypes = {each: dtype_name(entering) for each, (entering, _) in layout.dtypes.items()}
        entered = {call.path: call.input_shape for call in reversed(structure.called.modules)}
        entered |= {f"{call.parent}:{call.function}": call.input_shape for call in structure.called.functions}
        sites = tuple(
            replace(site, row=row_name(model, few, entered.get(site.path, ()), site.spec.rows, site.role))
            for site in measured.sites(structure, gradient_errors(structure.sites, dtypes))
        )
        leaks = find_leaks(model, structure, first)
        modes = change_of_modes(model, structure, first, data)
        modulations = find_modulations(model, structure, first)
    intended = stock_intent(model)
    facts = facts_of(
        model,
        structure,
        sites,
        measured.blocks(structure),
        measured.attentions(),
        name=name,
        text={
            "source": source,
            "tokens": tokens,
            "padding": padding,
            "loss": loss.value if counts == "token" else math.nan,
            # Tokens that cannot be decoded may be drawn at random, and no model predicts those.
            "uniform_loss": math.nan if decode is None or math.isnan(loss.value) else math.log(loss.vocabulary),
            "distinct": len(seen) or None,
            "unit": noun,
        },
        data=data,
        intent=intended,
        baseline=declared,
        leaks=leaks,
        modes=modes,
        modulations=modulations,
        shared=find_shared(model, structure),
        patches=patches(model, dict.fromkeys((*paths, *(intended.specs if intended else ())))),
        row_scatter=row_scatter(model),
        broken=_broken(model),
    )
    form, unknown = foldedness(model, structure.sites)
    inspection = judged(
        facts,
        walk=None if token is None else token.walk(decode),
        selections=tuple(selections),
        foldedness=form,
        foldedness_unknown=unknown,
    )
    if unwritten is not None:
        baseline.write(infer(inspection, facts.intent, source=unwritten.name), unwritten)
    return inspection


def _broken(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """Parameters with NaN or infinity, buffers with NaN (masks are infinite by design), and negative variances."""
    found = []
    buffers = ((name, buffer, buffer.detach) for name, buffer in model.named_buffers())
    for name, value, values in chain(parameters(model), buffers):
        if not value.is_floating_point() or (mine := local(values())).is_meta:
            continue
        # 8-bit types have no test of their own.
        mine = mine.float() if mine.element_size() == 1 else mine
        is_parameter = isinstance(value, nn.Parameter)
        # A sum of finite numbers may overflow, but a finite sum has no other terms; it takes a fiftieth of the time.
        total = mine.sum()
        if bool(total.isfinite() if is_parameter else ~total.isnan()):
            continue
        if count := int((~mine.isfinite() if is_parameter else mine.isnan()).sum()):
            found.append((name, count))
    for path, module in model.named_modules():
        variance = getattr(module, "running_var", None)
        if isinstance(variance, Tensor) and not variance.is_meta:
            # Its root is NaN.
            count = int((variance.detach() + float(getattr(module, "eps", 0.0)) < 0).sum())
            found += [(f"{path}.running_var", count)] if count else []
    return tuple(found)


def _middle_site(structure: Structure) -> str | None:
    """The first norm on the residual stream in the middle block, else the middle one of all."""
    paths = [site.path for site in structure.sites]
    on_stream: dict[int, str] = {}
    for site in structure.sites:
        block = block_of(site.parent, structure.blocks)
        if block is not None and structure.roles.get(site.path) in ("pre", "post", "output"):
            on_stream.setdefault(block, site.path)
    if on_stream:
        return on_stream[sorted(on_stream)[len(on_stream) // 2]]
    return paths[len(paths) // 2] if paths else None
