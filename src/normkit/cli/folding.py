"""`normkit fold`: folds a checkpoint exactly."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from normkit.checkpoint.plan import ALL, OPERATIONS
from normkit.cli.options import (
    json_option,
    matrix_option,
    metadata_option,
    model_argument,
    quiet_option,
    resume_option,
    scales_option,
    source_options,
    text_option,
    threads_option,
)
from normkit.cli.terminal import print_json, progress, results, shell_word, shows_progress

if TYPE_CHECKING:
    from normkit.checkpoint.headroom import Headroom

# Tokens on which `--fit` measures.
_TOKENS, _LENGTH, _BATCH = 2048, 256, 4

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}

_HELP = """Fold the norms of the checkpoint SRC into its matrices and write the result to the new folder DST.

\b
gain      W (g * z) = (W diag(g)) z: gains go into the matrices that read them
bias      W b goes into their biases; where there are none, b / g remains
final     both, for the norm before the head; a tied head needs --untie
centre    sums that only LayerNorms read lose their mean
rms       such LayerNorms become RMSNorms with the same eps
value     the bias of values moves behind the attention
exponent  in place of gain and final: only the power of two of each gain
          moves, a gain in [0.7, 1.4] stays; no bit is lost in any dtype
migrate   a gain is divided by scales, the columns of its readers multiplied,
          as SmoothQuant and AWQ do; the gains stay in the norms
scale     the residual stream 2^-K of what it was, and eps 4^-K: for float16;
          K from --halvings, or from --fit
rotate    the residual stream and the values of each head times a random
          Hadamard matrix, or --matrix, which tames outliers; with gain, bias, final,
          and rms where there are LayerNorms
unoffset  gains that are stored less 1 become plain, in a stock class that
          computes the same: a Gemma 1 becomes a Granite
batchnorm alone; of a model with batch norms, by default: each goes into the
          convolution or linear map before it, else into the one after it

SRC is a folder with a transformers model, a config.json or model.safetensors in one, or else a Hub id. A step that
would change the model's answers is not done, and the result says why. The weights are streamed: memory does not grow
with them. DST appears when everything is written. `normkit verify SRC DST` proves the result from the files.
DST may be a .gguf file, which takes tokenizer and settings from another GGUF of SRC (--metadata).
"""


def _bytes(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """A number of bytes from a text such as 1GB or 800MB."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?)B?", value.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise click.BadParameter(f"expected a size such as 1GB or 800MB, got {value!r}", ctx, parameter)
    return int(float(match[1]) * _UNITS[match[2]])


def _operations(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Operations from their names, separated by commas, or from "all"."""
    if value is None:
        return None
    given = tuple(name.strip() for name in value.split(",") if name.strip())
    if given == ("all",):
        return ALL
    if not given or not set(given) <= set(OPERATIONS):
        wrong = next((name for name in given if name not in OPERATIONS), value)
        expected = f"expected all, or some of {','.join(OPERATIONS)}, got {wrong!r}"
        raise click.BadParameter(expected, ctx, parameter)
    return given


@click.command("fold", help=_HELP, short_help="Fold the norms of a checkpoint into its matrices, exactly.")
@model_argument("source", "SRC")
@click.argument("destination", metavar="[DST]", type=click.Path(path_type=Path), required=False)
@click.option(
    "--ops",
    callback=_operations,
    metavar="LIST",
    help="Some of the list above; all is the first six.  [default: gain,bias,final, or batchnorm]",
)
@click.option("--untie", is_flag=True, help="Give a tied head its own copy of the table, if what is done needs one.")
@click.option(
    "--dtype",
    type=click.Choice(["same", "float32", "float16", "bfloat16"]),
    default="same",
    show_default=True,
    help="Dtype of the written weights; the last two are for GGUF.",
)
@metadata_option
@click.option("--halvings", type=int, default=0, metavar="K", help="For scale: divide the residual stream by 2^K.")
@click.option(
    "--fixed-eps",
    is_flag=True,
    help="For scale: accept norms whose eps stands in code and acts as 4^K times itself; the plan says what it moves.",
)
@click.option("--seed", type=int, default=None, metavar="N", help="For rotate: seed of the random signs.  [default: 0]")
@matrix_option
@scales_option
@click.option(
    "--alpha",
    type=float,
    metavar="A",
    help="For migrate: FILE holds max|x| of each channel, and scales are max|x|^A / max|w|^(1 - A).",
)
@click.option("--powers-of-two", is_flag=True, help="For migrate: round the scales, so that no bit is lost.")
@click.option(
    "--fit",
    type=click.Choice(["float16"]),
    help="For scale: run the model on a text and take the K with which its stream fits.",
)
@text_option
@click.option("--max-memory", callback=_bytes, metavar="SIZE", help="Use at most this much memory, such as 1GB.")
@threads_option
@resume_option
@click.option("--plan", "only_plan", is_flag=True, help="Print what would be done, and write nothing.")
@click.option(
    "--mappings",
    type=click.Choice(["llm-compressor"]),
    help="With --plan: print as JSON which norm feeds which linear maps, in the form that this quantizer takes.",
)
@click.option("--for-training", is_flag=True, help="Refuse a model with dropout, as it would train differently.")
@json_option
@source_options
@quiet_option
def fold_checkpoint(
    source: str,
    destination: Path | None,
    ops: tuple[str, ...] | None,
    untie: bool,
    dtype: str,
    metadata: Path | None,
    halvings: int,
    fixed_eps: bool,
    seed: int | None,
    matrix: Path | None,
    scales: Path | None,
    alpha: float | None,
    powers_of_two: bool,
    fit: str | None,
    text: str | None,
    max_memory: int | None,
    threads: int,
    resume: bool,
    only_plan: bool,
    mappings: str | None,
    for_training: bool,
    as_json: bool,
    revision: str | None,
    local_files_only: bool,
    quiet: bool,
) -> None:
    """Fold a checkpoint, or print what folding would do."""
    from normkit.checkpoint.folding import memory_needed, write_folded
    from normkit.checkpoint.hub import find_model
    from normkit.checkpoint.migration import asked_scales
    from normkit.checkpoint.model_folder import snapshot_of
    from normkit.checkpoint.opening import open_checkpoint, refuse_gguf
    from normkit.checkpoint.orthogonal import asked_matrices
    from normkit.checkpoint.planning import make_plan
    from normkit.errors import InputError

    shown = shows_progress(quiet=quiet or as_json)
    refuse_gguf(Path(source).expanduser())
    folder, identifier = find_model(source, revision, local_files_only=local_files_only, show_downloads=shown)
    if destination is None and not only_plan:
        raise click.UsageError("Missing argument 'DST', the folder to write; --plan needs none.")
    if mappings is not None:
        if not only_plan:
            raise click.UsageError("--mappings needs --plan: it prints, and writes nothing.")
        from normkit.checkpoint.report import norm_mappings

        with open_checkpoint(folder) as opened:
            print_json(norm_mappings(opened.graph))
        return
    if text is not None and fit is None:
        raise click.UsageError("--text needs --fit: only a fit runs the model.")
    if fit is not None and (halvings or "scale" not in (ops or ())):
        raise click.UsageError("--fit is for --ops scale, in place of --halvings.")
    given = asked_scales(scales, alpha=alpha, powers_of_two=powers_of_two)
    matrices = None if matrix is None else asked_matrices(matrix)
    measured = _headroom(folder, text, fixed_eps=fixed_eps) if fit else None
    if measured is not None and not measured.halvings:
        raise InputError(f"nothing needs to be scaled: {measured}")
    with open_checkpoint(folder) as opened:
        is_gguf = destination is not None and destination.suffix == ".gguf"
        if is_gguf != (metadata is not None) or (is_gguf and resume):
            raise click.UsageError("DST.gguf and --metadata FILE.gguf belong together, without --resume.")
        if not is_gguf and dtype in ("float16", "bfloat16"):
            raise click.UsageError(f"--dtype {dtype} is for DST.gguf; a folder has the dtype of SRC, or float32.")
        folded_dtype = dtype
        if is_gguf:
            from normkit.checkpoint.gguf_folds import gguf_dtypes, write_gguf

            _, folded_dtype = gguf_dtypes(opened.source, dtype)
        plan = make_plan(
            opened,
            operations=ops,
            untie=untie,
            dtype=folded_dtype,
            for_training=for_training,
            halvings=measured.halvings if measured else halvings,
            fixed_eps=fixed_eps,
            seed=seed,
            matrix=matrices,
            scales=given,
        )
        memory = None
        document = {"schema_version": 1, **plan.to_json()}
        if only_plan or destination is None:
            memory = memory_needed(plan, opened.source, threads)
        elif metadata is not None:
            with progress(shown=shown) as report:
                write_gguf(
                    *(plan, opened, destination.expanduser(), metadata),
                    dtype=dtype,
                    untie=untie,
                    threads=threads,
                    max_memory=max_memory,
                    progress=report,
                )
        else:
            with progress(shown=shown) as report:
                certificate = write_folded(
                    plan,
                    opened,
                    destination.expanduser(),
                    untie=untie,
                    dtype=dtype,
                    max_memory=max_memory,
                    threads=threads,
                    resume=resume,
                    progress=report,
                )
            document = certificate.to_json()
        if as_json:
            print_json(document)
            return
        from normkit.checkpoint.report import describe_plan
        from normkit.show.terminal import section

        described = describe_plan(plan, opened.source.tensors, memory)
        if measured is not None:
            described = dataclasses.replace(described, remarks=(str(measured), *described.remarks))
        results().print(section(described, most=40))
    if not only_plan:
        pinned = snapshot_of(folder) if identifier else ""
        named = pinned or (source if revision is None else f"{source}@{revision}")
        words = [shell_word(named), shell_word(str(destination))]
        for option, file in (("--metadata", metadata), ("--matrix", matrix), ("--scales", scales)):
            words += [] if file is None else [option, shell_word(str(file))]
        results().print(f"\nfolded: {words[1]}\nproof:  normkit verify {' '.join(words)}", soft_wrap=True)


def _headroom(folder: Path, path: str | None, *, fixed_eps: bool) -> Headroom:
    """How large the numbers of a model become on a text, in float32."""
    from normkit.checkpoint.headroom import headroom
    from normkit.checkpoint.loading import load_model
    from normkit.checkpoint.opening import open_checkpoint
    from normkit.cli.texts import batches_for, read_text

    words = None if path is None else read_text(path, _TOKENS)
    loaded = load_model(str(folder), dtype="float32")
    batches = batches_for(loaded, path, words, length=_LENGTH, max_tokens=_TOKENS, batch_size=_BATCH)
    with open_checkpoint(folder) as opened:
        return headroom(loaded.model, opened.graph, batches.batches, fixed_eps=fixed_eps)
