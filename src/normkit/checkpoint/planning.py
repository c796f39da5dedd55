"""From the graph of a checkpoint and what is asked for to a plan: reads headers and vectors, never a matrix.

Each operation is planned in a file of its own: affine.py, centring.py, scaling.py, rotation.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from normkit.checkpoint.affine import expected_rounding, move_affine, move_value_bias
from normkit.checkpoint.build_model import KEY, record
from normkit.checkpoint.centring import become_rms, centre_writers, change_family
from normkit.checkpoint.migration import Scales, scales_of_norms
from normkit.checkpoint.model_folder import CONFIG, code_files
from normkit.checkpoint.offsets import store_plain_gains
from normkit.checkpoint.opening import Opened, OpenedFolder, paths_to
from normkit.checkpoint.orthogonal import Matrices, check_sizes
from normkit.checkpoint.plan import (
    DTYPE_KEYS,
    DTYPES,
    OPERATIONS,
    Edit,
    FoldPlan,
    NormChange,
    Operation,
    Refusal,
    TensorEdit,
    VectorEdit,
)
from normkit.checkpoint.plan_builder import FoldContext, PlanBuilder
from normkit.checkpoint.rotation import head_width, rotate_stream, rotate_values
from normkit.checkpoint.scaling import scale_stream
from normkit.errors import InputError
from normkit.models.graph import Norm
from normkit.models.settings import Settings
from normkit.spec import NormSpec
from normkit.text import counted, percent

MOST_HALVINGS = 24
"""More would take float16 below what it holds."""
DEFAULT: tuple[Operation, ...] = ("gain", "bias", "final")
BATCH_NORMS_ONLY = "untie and for_training are not for batch norms: a folded one no longer normalizes; leave them out"


def make_plan(
    opened: Opened,
    *,
    operations: Collection[str] | None = None,
    untie: bool = False,
    dtype: str = "same",
    for_training: bool = False,
    change_class: bool = True,
    halvings: int = 0,
    fixed_eps: bool = False,
    seed: int | None = None,
    matrix: Matrices | None = None,
    scales: Scales | None = None,
    stays: tuple[Refusal, ...] | None = None,
) -> FoldPlan:
    """Decide what folding does to each tensor, and what it does not do and why.

    Args:
        opened: The checkpoint.
        operations: Any of `OPERATIONS`; None is `DEFAULT`.
        untie: Give a tied head a table of its own, so that the final gain can enter it and the embeddings be centred;
            where both stay alike, none is made.
        dtype: Dtype of what is written: "same", or "float32".
        for_training: The result will be trained further: dropout is then an error.
        change_class: The model may become one of another family, if that family computes the same.
        halvings: For "scale", how often the residual stream is halved.
        fixed_eps: For "scale": norms whose eps cannot follow their input may act as with another.
        seed: For "rotate", the seed of the signs; None is 0.
        matrix: For "rotate", matrices in place of the seed.
        scales: For "migrate".
        stays: For "rotate": why the stream is not rotated, where that is known; then only values are, and no operation
            is taken along for the stream.

    Raises:
        InputError: If an argument is not one of its choices, or the model has dropout and will be trained further.
        ModelError: If gains or biases hold NaN or infinity.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype must be 'same' or 'float32', got {dtype!r}")
    if asks_batch_norms(operations, opened.source.tensors):
        if untie or for_training:
            raise InputError(BATCH_NORMS_ONLY)
        return _batch_norm_plan(opened, dtype)
    graph, config, source = opened.graph, opened.config, opened.source
    if unknown := [name for name in operations or () if name not in OPERATIONS]:
        raise InputError(f"operations are {', '.join(OPERATIONS)}, got {unknown[0]!r}")
    if operations is not None and not operations:
        raise InputError(f"expected at least one operation of {', '.join(OPERATIONS)}, got none")
    asked = DEFAULT if operations is None else tuple(name for name in OPERATIONS if name in operations)
    given = asked
    if "rotate" in asked:
        kinds = {norm.kind for norm in graph.norms if norm.reads in graph.stream}
        needed = {*asked, "gain", "bias", "final", *(["rms"] if "layer" in kinds else [])}
        asked = asked if stays is not None else tuple(name for name in OPERATIONS if name in needed)
        seed = 0 if seed is None and matrix is None else seed
    if matrix is not None and ("rotate" not in asked or seed is not None):
        raise InputError("a matrix is for rotate, in place of a seed; leave one of them out")
    if seed is not None and ("rotate" not in asked or not 0 <= seed < 2**63):
        raise InputError(f"rotate takes a seed of 0 to 2^63 - 1, got {seed} with {', '.join(asked)}")
    if "exponent" in asked and (rival := next((name for name in asked if name in ("gain", "final")), None)):
        raise InputError(f"exponent leaves the mantissas that {rival} would fold; ask for one of them")
    if ("migrate" in asked) != (scales is not None):
        raise InputError(f"migrate takes scales, got {'none' if scales is None else 'some'} with {', '.join(asked)}")
    rivals = [name for name in ("rotate", "exponent", "gain", "bias", "final") if name in asked]
    if scales is not None and rivals:
        raise InputError(
            f"migrate and {rivals[0]} change the same gains; fold with {rivals[0]} first, then fold the result"
        )
    if fixed_eps and "scale" not in asked:
        raise InputError(f"fixed_eps is for scale, got it with {', '.join(asked)}; leave it out")
    if ("scale" in asked) != (halvings != 0) or not 0 <= halvings <= MOST_HALVINGS:
        raise InputError(f"scale takes 1 to {MOST_HALVINGS} halvings, got {halvings} with {', '.join(asked)}")
    settings = Settings(graph.family, config)
    rates = {key: settings.value(key) for key in graph.family.config.dropout}
    dropout = ", ".join(f"{key} = {rate}" for key, rate in rates.items() if rate)
    if dropout and for_training:
        raise InputError(
            f"expected no dropout in a model to be trained further, got {dropout}: under it the folded model trains "
            "differently; set it to 0 in config.json, or leave out for_training"
        )
    context = FoldContext(
        graph=graph,
        settings=settings,
        source=source,
        operations=asked,
        untie=untie and graph.is_tied and graph.against_untying() is None,
        scales={} if scales is None else scales_of_norms(scales, graph, source),
        has_powers=scales is not None and scales.powers_of_two,
    )
    builder = PlanBuilder(source.tensors, dtype)
    named = config["architectures"][0]
    written: dict[str, Any] = {} if graph.architecture == named else {"architectures": [graph.architecture]}
    head = next((linear for linear in graph.linears if linear.tied_to), None) if context.untie else None
    if head is not None:
        if head.weight not in source.tensors:
            builder.copy_table(head.weight, str(head.tied_to))
        if head.parted_bias is not None:
            builder.follow(head.parted_bias, str(head.bias))
        for place, stored in graph.shared.items():
            builder.part(place, stored)
    elif untie and (reason := graph.against_untying()):
        builder.refuse("final", graph.architecture, reason)
    changes = tuple(move_affine(context, builder, norm) for norm in graph.norms)
    centred = centre_writers(context, builder) if {"centre", "rms"} & set(asked) else ()
    if "value" in asked:
        for attention in graph.attentions:
            move_value_bias(context, builder, attention)
    acting: dict[str, NormSpec] = {}
    if "scale" in asked:
        keys, acting = scale_stream(context, builder, halvings, fixed_eps=fixed_eps)
        written |= keys
    swaps: dict[str, NormSpec] = {}
    dropped: tuple[str, ...] = ()
    if "rms" in asked:
        changes, swaps = become_rms(context, builder, changes)
        keyed = {norm.module for norm in graph.norms if norm.eps_key in written}
        swaps = {
            path: spec.replace(eps=(spec.eps or 0.0) * 0.25**halvings) if path in keyed else spec
            for path, spec in swaps.items()
        }
        if swaps and change_class and (other := change_family(context, builder, len(swaps))) is not None:
            swaps, written, dropped = {}, written | other[0], tuple(key for key in other[1] if key in config)
    sums: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    if (by := seed if matrix is None else matrix) is not None:
        if matrix is not None:
            check_sizes(matrix, graph, {each.name: head_width(context, each) for each in graph.attentions})
        becomes_rms = {norm.name for norm in changes if norm.becomes_rms}
        sums = rotate_stream(context, builder, becomes_rms, by) if stays is None else ()
        if stays is None and not sums and asked != given:
            # Gains that leave their norms for a stream that does not turn would only cost a rounding.
            left = tuple(refusal for refusal in builder.refusals if refusal.operation == "rotate")
            return make_plan(
                opened,
                operations=given,
                untie=untie,
                dtype=dtype,
                for_training=for_training,
                change_class=change_class,
                halvings=halvings,
                fixed_eps=fixed_eps,
                seed=seed,
                matrix=matrix,
                stays=left,
            )
        builder.refusals += stays or ()
        values = tuple(each.name for each in graph.attentions if rotate_values(context, builder, each, by))
    untied = head is not None and not builder.take_back_copy(head)
    if untied and graph.family.tie is not None:
        # The key is set at every level of the configuration that has it.
        key = graph.family.tie.key
        written = dict.fromkeys(sorted({key, *paths_to(config, key)}), False) | written
    if "unoffset" in asked:
        changes, plain, removed = store_plain_gains(context, builder, changes, change_class=change_class)
        written, dropped = written | plain, (*dropped, *(key for key in removed if key in config))
    if swaps:
        written[KEY] = record(swaps)
    written |= _dtype_keys(config, dtype)
    if "auto_map" in config:
        dropped = (*dropped, "auto_map")
    edits = builder.edits()
    return FoldPlan(
        family=graph.family.model_type,
        architecture=graph.architecture,
        operations=asked,
        untie=untied,
        edits=edits,
        norms=changes,
        refusals=builder.refusals,
        centred=centred,
        rotated_sums=sums,
        rotated_values=values,
        config=written,
        dropped=dropped,
        swaps={path: spec.to_json() for path, spec in swaps.items()},
        acts_as={path: spec.to_json() for path, spec in acting.items()},
        options={
            **({"halvings": halvings} if halvings else {}),
            **({"fixed_eps": True} if fixed_eps else {}),
            **({} if seed is None else {"seed": seed}),
            **({} if matrix is None else {"matrix": matrix.sha256}),
            **({} if scales is None else scales.options),
        },
        remarks=(
            *([f"equal in evaluation mode, not under dropout ({dropout})"] if dropout else ()),
            *(
                [f"its config names {named}, and no head is there: it is a {graph.architecture}"]
                if graph.architecture != named
                else []
            ),
            *_remarks(context, opened, edits, changes, untied=untied),
            *_on_rotations(sums, values, is_asked="rotate" in asked),
            *_on_eps(acting, graph.norms, halvings),
            *([matrix.remark] if matrix is not None else ()),
            *graph.family.remarks,
        ),
    )


def _remarks(
    context: FoldContext, opened: Opened, edits: Sequence[Edit], changes: Sequence[NormChange], *, untied: bool
) -> list[str]:
    """Notes for the user about the edits, one sentence each."""
    remarks, graph = [], context.graph
    if whole := sum(len(norm.kept) for norm in changes if norm.gain in ("mantissa", "scaled")):
        dtypes = " and ".join(sorted({edit.dtype for edit in edits if edit.relation in ("power", "product")}))
        stay = "stays" if whole == 1 else "stay"
        remarks.append(f"{counted(whole, 'gain')} {stay} whole, as {dtypes} would lose a bit of what remains")
    if "scale" in context.operations and any(edit.exponent for edit in edits):
        remarks.append("hidden states are smaller by that power of two; what norms make of them is the same")
        vectors = [edit for edit in edits if isinstance(edit, VectorEdit)]
        if rounded := [edit for edit in vectors if edit.added and edit.exponent and not edit.offset]:
            remarks.append(
                f"{counted(len(rounded), 'gain')}, stored less 1 in float32, {'is' if len(rounded) == 1 else 'are'} "
                "rounded to it once more: no wider dtype can be written"
            )
    narrow = [edit for edit in edits if edit.dtype in ("F16", "BF16")]
    if any(isinstance(edit, VectorEdit) and edit.added and edit.relation == "sum" for edit in narrow):
        remarks.append(
            "gains become 1 + weight, rounded to 16 bits; dtype float32 avoids it, and so do gain and final beside "
            "unoffset, which leave gains of 1"
        )
    if any(edit.relation == "product" for edit in narrow):
        error, count = expected_rounding(edits, context.source)
        dtypes = " and ".join(sorted({edit.dtype for edit in narrow}))
        remarks.append(
            f"{'migrated' if context.scales else 'folded'} gains are rounded to {dtypes}: expected is an error of "
            f"{percent(error)} of a weight (rms, from {count:,} of the weights), and of about as much of what a layer "
            "gives; verify --logits measures what it moves; dtype float32 avoids it, and so "
            + ("do scales that are powers of two" if context.scales else "does exponent in place of gain and final")
        )
    if any(isinstance(edit, TensorEdit) and edit.centred_axis is not None for edit in edits):
        remarks.append("hidden states lose their mean; what norms and heads make of them is the same")
        if "rms" in context.operations and narrow:
            remarks.append(
                "writers rounded to 16 bits keep a small mean, which an RMSNorm sees and a LayerNorm does not; with "
                "dtype float32 it is some thousand times smaller"
            )
    if context.untie and not untied:
        remarks.append("the head still shares its table with the embeddings: nothing that was done needs another one")
    if untied and (tie := graph.family.tie) is not None and tie.ignored_by:
        remarks.append(
            f"{tie.head}.weight of a {graph.family.model_type} model is not read by {' and '.join(tie.ignored_by)}: "
            "the embeddings are taken for the head, or the folder is refused; for use there fold without untying"
        )
    return remarks + _code_left_out(opened)


def _on_rotations(sums: Sequence[str], values: Sequence[str], *, is_asked: bool) -> list[str]:
    """A note on what hidden states are, where something was to be rotated."""
    if sums:
        return ["hidden states are in other orthogonal coordinates: their norm is the same, their entries are not"]
    only = f"; only the values of {counted(len(values), 'attention')} are rotated" if values else ""
    return [f"the residual stream is not rotated, hidden states are those of before{only}"] if is_asked else []


def _on_eps(acting: Mapping[str, NormSpec], norms: Sequence[Norm], halvings: int) -> list[str]:
    """A note on norms whose eps does not follow their input, and on the rows for which that matters."""
    eps = [norm.eps for norm in norms if norm.module in acting and norm.eps is not None]
    if not eps:
        return []
    # The bound of scaling.py for a share of 2^-9, half a unit of bfloat16.
    variance = max(eps) * (4.0**halvings - 1) * 2.0**8
    return [
        f"the eps of {counted(len(eps), 'norm')} ({max(eps):g}) cannot follow what is halved {halvings} times: each "
        f"computes what SRC does with the eps in acts_as, {max(spec.eps or 0.0 for spec in acting.values()):.3g} at "
        "most; a row of variance v changes its length by (4^K - 1) eps / 2 v at most, which is below 2^-9 above "
        f"{variance:.3g}; verify --logits compares with SRC at that eps, and says what it moves"
    ]


def _code_left_out(opened: Opened) -> list[str]:
    """A note on code that is not carried over, if there is some."""
    code = code_files(opened.states) if isinstance(opened, OpenedFolder) else []
    left_out = [f"auto_map of {CONFIG}"] if "auto_map" in opened.config else []
    left_out += [", ".join([*sorted(code)[:3], *(["..."] if len(code) > 3 else [])])] if code else []
    stock = opened.config["architectures"][0]
    said = f"code is not carried over ({'; '.join(left_out)}): what is folded is the stock class {stock}"
    return [said] if left_out else []


def _dtype_keys(config: Mapping[str, Any], dtype: str) -> dict[str, str]:
    """The keys of config.json that make loaders keep float32 weights, at whatever level they would round them again."""
    if dtype == "same":
        return {}
    found = sorted({path for key in DTYPE_KEYS for path in paths_to(config, key)})
    return dict.fromkeys(found if any(key in config for key in DTYPE_KEYS) else ["dtype", *found], dtype)


def asks_batch_norms(operations: Collection[str] | None, names: Iterable[str]) -> bool:
    """Whether batch norms are to be folded: by name, or where nothing is named and there are some.

    Raises:
        InputError: If other operations are named too.
    """
    if operations is None:
        return any(name.endswith(".running_var") for name in names)
    if "batchnorm" in operations and set(operations) != {"batchnorm"}:
        raise InputError(f"batchnorm is folded alone, got {', '.join(operations)}; fold twice")
    return "batchnorm" in operations


def _batch_norm_plan(opened: Opened, dtype: str) -> FoldPlan:
    from normkit.checkpoint.batch_norm_files import REMARKS, fold_batch_norms

    assert isinstance(opened, OpenedFolder), "the batch norms of a module are folded in memory"
    builder = PlanBuilder(opened.source.tensors, dtype)
    changes, refusals = fold_batch_norms(opened, builder, dtype)
    return FoldPlan(
        family=opened.config["model_type"],
        architecture=opened.config["architectures"][0],
        operations=("batchnorm",),
        untie=False,
        edits=builder.edits(),
        norms=changes,
        refusals=refusals,
        config=_dtype_keys(opened.config, dtype),
        dropped=("auto_map",) if "auto_map" in opened.config else (),
        remarks=(*REMARKS, *_code_left_out(opened)),
    )
