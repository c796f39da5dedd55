"""`normkit verify`: a folded checkpoint compared with its source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from normkit.checkpoint.limits import LIMITS, by_limit
from normkit.cli.options import (
    json_option,
    matrix_option,
    metadata_option,
    model_argument,
    quiet_option,
    scales_option,
    source_options,
    text_option,
    threads_option,
)
from normkit.cli.terminal import print_json, progress, results, shows_progress
from normkit.errors import InputError

if TYPE_CHECKING:
    from normkit.checkpoint.loading import LoadedModel
    from normkit.checkpoint.logits import Agreement
    from normkit.measurement.texts import Batches

# Tokens of the text, and as many random ids: enough for every position of a window.
_TOKENS, _LENGTH, _BATCH = 256, 64, 4


_HELP = f"""Prove that the folder DST is what `normkit fold` makes of SRC, or say where it is not.

SRC is a folder with a transformers model, a config.json or model.safetensors in one, or else a Hub id. The plan is made
again from SRC, every tensor is derived again and compared bit for bit, and config.json, the index, the tokenizer and
the certificate are compared with what follows. The certificate only says what was asked for. Neither model is run, and
no file is held in memory.

With --logits both models are then run in float64, on a text or on images: how far apart their logits are, and how far
those of SRC move when its weights move within their rounding. Exit code 1 if anything fails.

DST may be a .gguf file that fold wrote: every tensor is derived again, arranged as llama.cpp has it, and compared bit
for bit; with --metadata its keys are compared with those of the file that they were taken from.

What this does not prove: {"; ".join(LIMITS)}.

Nor does it prove of an operation: {"; ".join(by_limit())}.
"""


@click.command("verify", help=_HELP, short_help="Prove a folded checkpoint from its source, tensor by tensor.")
@model_argument("source", "SRC")
@click.argument("result", metavar="DST", type=click.Path(path_type=Path))
@click.option("--logits", is_flag=True, help="Also run both models in float64, on a text and random ids, or on images.")
@text_option
@metadata_option
@scales_option
@matrix_option
@threads_option
@json_option
@source_options
@quiet_option
@click.pass_context
def verify_fold(
    ctx: click.Context,
    source: str,
    result: Path,
    logits: bool,
    text: str | None,
    metadata: Path | None,
    scales: Path | None,
    matrix: Path | None,
    threads: int,
    as_json: bool,
    revision: str | None,
    local_files_only: bool,
    quiet: bool,
) -> None:
    """Verify a fold: print what was checked; exit code 1 if anything fails."""
    if text is not None and not logits:
        raise click.UsageError("--text needs --logits: the files alone need no text.", ctx)
    is_gguf = result.suffix == ".gguf"
    if (metadata is not None and not is_gguf) or (is_gguf and logits):
        raise click.UsageError("--metadata is for DST.gguf, and --logits for a folder.", ctx)
    from normkit.checkpoint.hub import find_model
    from normkit.checkpoint.verification import verify
    from normkit.cli.texts import read_text

    words = None if text is None else read_text(text, _TOKENS)
    shown = shows_progress(quiet=quiet or as_json)
    folder, _ = find_model(source, revision, local_files_only=local_files_only, show_downloads=shown)
    with progress(shown=shown) as report:
        given: Any = {"scales": scales, "matrix": matrix, "threads": threads, "progress": report}
        if is_gguf:
            from normkit.checkpoint.gguf_proofs import verify_gguf

            found = verify_gguf(folder, result, metadata=metadata, **given)
        else:
            found = verify(folder, result, **given)
    agreement, tokens = _agreement(folder, result, text, words) if logits and found.passed else (None, "")
    if as_json:
        more = {} if agreement is None else {"logits": {"source": tokens, **agreement.to_json()}}
        passed = found.passed and (agreement is None or agreement.holds)
        print_json({**found.to_json(), "passed": passed, **more})
    else:
        from normkit.checkpoint.report import describe_proof
        from normkit.show.terminal import section

        results().print(section(describe_proof(found, agreement, tokens)))
    if not found.passed or (agreement is not None and not agreement.holds):
        ctx.exit(1)


def _agreement(source: Path, result: Path, path: str | None, words: str | None) -> tuple[Agreement, str]:
    """How near the logits are, and the texts on which they were compared."""
    from normkit.checkpoint.build_model import quiet_libraries, replay
    from normkit.checkpoint.certificate import Certificate
    from normkit.checkpoint.loading import load_model
    from normkit.checkpoint.logits import compare_logits, half_unit
    from normkit.checkpoint.model_folder import CERTIFICATE
    from normkit.spec import NormSpec

    models = [load_model(str(folder), dtype="float64", text_only=False) for folder in (source, result)]
    certificate = Certificate.read(result)
    acting = {path: NormSpec.from_json(spec) for path, spec in certificate.plan.get("acts_as", {}).items()}
    tensors = certificate.tensors.values()
    unit = half_unit({edit["dtype"] for edit in tensors if edit["relation"] in ("product", "sum")})
    batches = _batches(models[0], path, words)
    with quiet_libraries():
        inputs = [batch for each in batches for batch in each.batches]
        moved = 0.0
        if acting:
            moved = compare_logits(models[0].model, models[1].model, inputs, unit=0.0).difference
            replay(models[0].model, acting, CERTIFICATE)
        agreement = compare_logits(models[0].model, models[1].model, inputs, unit=unit)
        agreement = replace(agreement, moved_by_eps=moved)
    return agreement, " and ".join(each.source for each in batches)


def _batches(loaded: LoadedModel, path: str | None, words: str | None) -> list[Batches]:
    """Random token ids, and a text if the model has a tokenizer; or random pixels, and photographs if it reads them."""
    from normkit.cli.texts import batches_for
    from normkit.measurement.media import from_images, from_random_pixels
    from normkit.measurement.texts import from_random_ids

    reads = loaded.model.main_input_name
    if reads != "input_ids":
        if reads != "pixel_values" or path is not None:
            what = f"a model that reads {reads}" if path is None else f"--text of a model that reads {reads}"
            raise InputError(f"--logits runs models that read text or images, got {what}; leave it out")
        drawn = from_random_pixels(loaded.model)
        has_processor = loaded.processor is not None and not isinstance(loaded.processor, str)
        return [drawn, from_images(loaded, None, batch_size=_BATCH)] if has_processor else [drawn]
    drawn = from_random_ids(loaded.model, length=_LENGTH, max_tokens=_TOKENS, batch_size=_BATCH)
    if loaded.tokenizer is None and path is None:
        return [drawn]
    return [drawn, batches_for(loaded, path, words, length=_LENGTH, max_tokens=_TOKENS, batch_size=_BATCH)]
