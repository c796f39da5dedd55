"""From the graph of a checkpoint and what is asked for to a plan: reads headers and vectors, never a matrix."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from normkit.checkpoint.configuration import paths_to
from normkit.checkpoint.model_folder import CONFIG, code_files
from normkit.checkpoint.opening import Opened
from normkit.checkpoint.operations import become_rms, centre_writers, change_family, move_affine, move_value_bias
from normkit.checkpoint.plan import OPERATIONS, FoldPlan, Operation
from normkit.checkpoint.plan_builder import FoldContext, PlanBuilder
from normkit.checkpoint.source import Source
from normkit.checkpoint.swaps import KEY, record
from normkit.errors import InputError
from normkit.models import legality
from normkit.models.conditions import Settings
from normkit.models.graph import Graph
from normkit.spec import NormSpec

DEFAULT: tuple[Operation, ...] = ("gain", "bias", "final")
DTYPES = ("same", "float32")
DTYPE_KEYS = ("dtype", "torch_dtype")
"""The keys of config.json that say what the weights are rounded to on loading; transformers 4 has the second name."""

ROUNDING = (
    "each product is rounded once to 16 bits, as the weights are: on SmolLM2-135M this moved logits by 0.37 of 50 (KL "
    "4e-5, the same first token at 99.7 % of places), on Gemma 3 270M by 5.7 of 64 (4e-4, 99.2 %); float32 avoids it"
)
_CODE_KEY = "auto_map"


def make_plan(
    graph: Graph,
    config: Mapping[str, Any],
    source: Source,
    *,
    operations: Collection[str] | None = None,
    untie: bool = False,
    dtype: str = "same",
    for_training: bool = False,
    change_class: bool = True,
    code: Collection[str] = (),
) -> FoldPlan:
    """Decide what folding does to each tensor, and what it does not do and why.

    Args:
        graph: The graph of the checkpoint.
        config: Its config.json.
        source: Its tensors.
        operations: Any of `OPERATIONS`; None is `DEFAULT`.
        untie: Give a tied head a table of its own, so that the final gain can enter it and the embeddings be centred.
        dtype: Dtype of what is written: "same", or "float32".
        for_training: The result will be trained further: dropout is then an error.
        change_class: The model may become one of another family, if that family computes the same.
        code: Names of files of code beside the weights; they are not copied.

    Raises:
        InputError: If an argument is not one of its choices, or the model has dropout and will be trained further.
        ModelError: If gains or biases hold NaN or infinity.
    """
    asked = _operations(operations)
    if dtype not in DTYPES:
        raise InputError(f"dtype must be 'same' or 'float32', got {dtype!r}")
    settings = Settings(graph.family, config)
    remarks = _on_dropout(graph, settings, for_training=for_training)
    context = FoldContext(
        graph=graph,
        settings=settings,
        source=source,
        operations=asked,
        untie=untie and graph.is_tied and legality.against_untying(graph) is None,
    )
    builder = PlanBuilder(source.tensors, dtype)
    written = _untie(context, builder, config) if context.untie else {}
    if untie and not context.untie and (reason := legality.against_untying(graph)):
        builder.refuse("final", graph.architecture, reason)
    changes = tuple(move_affine(context, builder, norm) for norm in graph.norms)
    centred = centre_writers(context, builder) if {"centre", "rms"} & set(asked) else ()
    if "value" in asked:
        for attention in graph.attentions:
            move_value_bias(context, builder, attention)
    swaps: dict[str, NormSpec] = {}
    dropped: tuple[str, ...] = ()
    if "rms" in asked:
        changes, swaps = become_rms(context, builder, changes)
        if swaps and change_class and (other := change_family(context, builder, len(swaps))) is not None:
            swaps, written, dropped = {}, written | other[0], tuple(key for key in other[1] if key in config)
    if swaps:
        written[KEY] = record(swaps)
    if dtype == "float32":
        # Loaders would round the weights again, at whatever level a key says so.
        found = sorted({path for key in DTYPE_KEYS for path in paths_to(config, key)})
        paths = found if any(key in config for key in DTYPE_KEYS) else ["dtype", *found]
        written |= dict.fromkeys(paths, dtype)
    if _CODE_KEY in config:
        dropped = (*dropped, _CODE_KEY)
    edits = builder.edits()
    if any(edit.relation == "product" and edit.dtype in ("F16", "BF16") for edit in edits):
        remarks.append(ROUNDING)
    return FoldPlan(
        family=graph.family.model_type,
        architecture=graph.architecture,
        operations=asked,
        untie=context.untie,
        edits=edits,
        norms=changes,
        refusals=builder.refusals,
        centred=centred,
        config=written,
        dropped=dropped,
        swaps={path: spec.to_json() for path, spec in swaps.items()},
        remarks=(
            *remarks,
            *_on_centring(source, centred, asked, dtype),
            *_on_untying(graph, untie=context.untie),
            *_on_code(config, graph, code),
            *graph.family.remarks,
        ),
    )


def plan_checkpoint(
    opened: Opened,
    *,
    operations: Collection[str] | None = None,
    untie: bool = False,
    dtype: str = "same",
    for_training: bool = False,
) -> FoldPlan:
    """The plan of a checkpoint on disk; arguments and errors of `make_plan`."""
    return make_plan(
        opened.graph,
        opened.config,
        opened.source,
        operations=operations,
        untie=untie,
        dtype=dtype,
        for_training=for_training,
        code=code_files(opened.states),
    )


def require_change(plan: FoldPlan) -> None:
    """Raise InputError, with the first refusal, for a plan that changes nothing because everything was refused."""
    if (
        plan.refusals
        and not plan.swaps
        and all(path.rpartition(".")[2] in DTYPE_KEYS for path in plan.config)
        and all(edit.relation == "identical" for edit in plan.edits)
    ):
        first, more = plan.refusals[0], len(plan.refusals) - 1
        rest = f" (and {more} more)" if more else ""
        raise InputError(f"nothing of what was asked can be done: {first.place}: {first.reason}{rest}")


def _operations(given: Collection[str] | None) -> tuple[Operation, ...]:
    if given is None:
        return DEFAULT
    if unknown := [name for name in given if name not in OPERATIONS]:
        raise InputError(f"operations are {', '.join(OPERATIONS)}, got {unknown[0]!r}")
    if not given:
        raise InputError(f"expected at least one operation of {', '.join(OPERATIONS)}, got none")
    return tuple(name for name in OPERATIONS if name in given)


def _on_dropout(graph: Graph, settings: Settings, *, for_training: bool) -> list[str]:
    rates = {key: settings.value(key) for key in graph.family.config.dropout}
    active = ", ".join(f"{key} = {rate}" for key, rate in rates.items() if rate)
    if active and for_training:
        raise InputError(
            f"expected no dropout in a model to be trained further, got {active}: under it the folded model trains "
            "differently; set it to 0 in config.json, or leave out for_training"
        )
    return [f"equal in evaluation mode, not under dropout ({active})"] if active else []


def _untie(context: FoldContext, builder: PlanBuilder, config: Mapping[str, Any]) -> dict[str, Any]:
    """Give the head a table of its own; the keys of config.json that say so, at every level."""
    head = next(linear for linear in context.graph.linears if linear.tied_to)
    if head.weight not in context.source.tensors:
        builder.copy_table(head.weight, str(head.tied_to))
    if head.parted_bias is not None:
        builder.copy_bias(head.parted_bias, str(head.bias))
    key = context.graph.family.tie.key if context.graph.family.tie else ""
    return dict.fromkeys(sorted({key, *paths_to(config, key)}), False)


def _on_untying(graph: Graph, *, untie: bool) -> list[str]:
    tie = graph.family.tie
    if not untie or tie is None or not tie.ignored_by:
        return []
    return [
        f"{tie.head}.weight of a {graph.family.model_type} model is not read by {' and '.join(tie.ignored_by)}: the "
        "embeddings are taken for the head, or the folder is refused; for use there fold without untying"
    ]


def _on_code(config: Mapping[str, Any], graph: Graph, code: Collection[str]) -> list[str]:
    """The stock class is what was folded; code beside it may compute anything."""
    left = [f"{_CODE_KEY} of {CONFIG}"] if _CODE_KEY in config else []
    left += [", ".join([*sorted(code)[:3], *(["..."] if len(code) > 3 else [])])] if code else []
    if not left:
        return []
    return [f"code is not carried over ({'; '.join(left)}): what is folded is the stock class {graph.architecture}"]


def _on_centring(source: Source, centred: tuple[str, ...], asked: tuple[Operation, ...], dtype: str) -> list[str]:
    if not centred:
        return []
    remarks = ["hidden states lose their mean; what norms and heads make of them is the same"]
    if "rms" in asked and dtype == "same" and {"F16", "BF16"} & {info.dtype for info in source.tensors.values()}:
        remarks.append(
            "writers rounded to 16 bits keep a small mean, which an RMSNorm sees and a LayerNorm does not; with dtype "
            "float32 it is some thousand times smaller"
        )
    return remarks
