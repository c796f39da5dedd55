"""The stored gains and biases of a port against its reference's: the relation of each, and whether it is right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from normkit.comparison.folded_batch_norms import FoldedBatchNorm, compare_folded
from normkit.comparison.folded_gains import Folding, begins, folding, holds_bias, readers_of
from normkit.comparison.gguf_file import with_reference_names
from normkit.comparison.other_tensors import OtherTensors, compare_others
from normkit.comparison.parameter_pairs import TensorPair, kind_of, pair_norms, renamed
from normkit.comparison.parameters import NormTensors, norm_tensors
from normkit.comparison.relations import Kind, Relation, relation
from normkit.comparison.running_statistics import RunningStatistics, compare_running
from normkit.comparison.runtimes import Convention, convention, elsewhere, judged
from normkit.comparison.value_groups import Role, TensorValue, ValueGroup, grouped, origins, with_layer_order
from normkit.comparison.weights import Weights
from normkit.text import by_value, shortened

Progress = Callable[[str, int, int], None]
ROLES: tuple[Role, Role] = ("weight", "bias")
_FOLDED: Mapping[bool | None, Kind] = {True: "folded", False: "constant", None: "undecided"}


@dataclass(frozen=True, kw_only=True)
class Values:
    """All gains and biases of a port against the reference's."""

    port: str
    reference: str
    tensors: tuple[TensorValue, ...]
    """In the port's order."""
    missing: tuple[str, ...]
    """Names of the reference's gains and biases of norms that have no counterpart in the port and should have one."""
    extra: tuple[str, ...]
    """Names of the port's gains and biases of norms that have no counterpart in the reference and change something."""
    left_out: Mapping[str, str]
    """Name of a vector of the port that is not taken for a norm's -> why."""
    others: OtherTensors
    """The tensors that are not of norms."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor that the other side's runtime does not keep in its file -> where it is."""
    packed: Mapping[str, str] = field(default_factory=dict)
    """Name of a quantized matrix of either side that is not read -> how its file holds it."""
    running: tuple[RunningStatistics, ...] = ()
    """The running statistics of batch norms."""
    batch_norms: tuple[FoldedBatchNorm, ...] = ()
    """The batch norms of the reference that the port lacks, found in the maps beside them."""
    holding: tuple[str, ...] = ()
    """Names of the port's matrices that hold what gains of the reference lost."""
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[ValueGroup, ...]:
        """The tensors by relation and verdict: wrong ones first, then undecided ones, then right ones."""
        return grouped(self.tensors)

    @property
    def unread(self) -> Mapping[str, tuple[str, ...]]:
        """How a file holds quantized matrices that are not read -> their names."""
        return by_value(self.packed)

    @property
    def is_right(self) -> bool | None:
        """Whether every gain and bias is right; None if none is wrong and some are undecided."""
        if self.missing or self.extra or not all(each.is_right for each in self.running):
            return False
        judged = [each.is_right for each in self.tensors] + [each.is_right for each in self.batch_norms]
        if False in judged:
            return False
        return True if judged and all(judged) else None

    def with_folded(self, paths: Collection[str]) -> Values:
        """The values, where a run has shown that what reads these norms holds their gains and biases."""
        tensors = []
        for each in self.tensors:
            if each.path in paths:
                reason = (
                    f"{each.relation.words.partition(':')[0]}: folded into its readers, as the rows behind them show"
                )
                made = replace(each.relation, kind="folded", reason=reason)
                each = replace(each, relation=made, verdict="", is_right=True)
            tensors.append(each)
        return replace(self, tensors=tuple(tensors))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **vars(self),
            "is_right": self.is_right,
            "groups": [each.to_json() for each in self.groups],
            "tensors": [each.to_json() for each in self.tensors],
            "others": {**vars(self.others)},
            "packed": {**self.packed},
            "running": [each.to_json() for each in self.running],
            "batch_norms": [each.to_json() for each in self.batch_norms],
        }


class _Vectors:
    """The gains and biases of one side, each read once."""

    def __init__(self, weights: Weights) -> None:
        self._source = weights.source
        self._read: dict[str, Tensor] = {}

    def of(self, name: str) -> Tensor:
        if name not in self._read:
            info = self._source.tensors[name]
            rows = self._source.rows(name, 0, info.matrix[0])
            self._read[name] = rows.reshape(-1).to(torch.float64)
        return self._read[name]

    def dtype(self, name: str) -> str:
        return self._source.tensors[name].dtype


def compare_values(port: Weights, reference: Weights, progress: Progress | None = None) -> Values:
    """Find the relation of every gain and bias of a port to the reference's; nothing is run.

    The vectors of norms are read, and a few rows of each matrix.

    Args:
        port: The parameters of the port.
        reference: Those of the reference.
        progress: Called with a stage's name, the steps done and the steps in all.

    Raises:
        ModelError: If a file cannot be read to its end.

    Example:
        >>> from normkit.comparison.weights import weights_of
        >>> gain = torch.randn(64)
        >>> found = compare_values(weights_of({"norm.weight": gain + 1}), weights_of({"norm.weight": gain}))
        >>> [group.words for group in found.groups]
        ['reference + 1']
    """
    report = progress or (lambda _stage, _done, _total: None)
    port, reference = with_reference_names(port, reference), with_reference_names(reference, port)
    ours, theirs = norm_tensors(port.source.tensors), norm_tensors(reference.source.tensors)
    held, held_there = _Vectors(port), _Vectors(reference)

    def related(one: NormTensors, other: NormTensors) -> bool:
        for name, name_there in ((one.weight, other.weight), (one.bias, other.bias)):
            if name is not None and name_there is not None:
                found = _relation(held, held_there, name, name_there)
                return found.kind not in ("different", "undecided", "constant", "not finite")
        return False

    pairs = pair_norms(ours.norms, theirs.norms, related, names=port.names, reference_names=reference.names)
    known = {id(pair.reference) for pair in pairs}
    lost = [norm for norm in theirs.norms if id(norm) not in known]
    pairs += tuple(renamed(port, reference, lost, [*ours.left_out, *ours.others], (held.of, held_there.of)))
    found: list[TensorValue] = []
    missing: list[str] = []
    extra: list[str] = []
    neutral: list[str] = []
    spare: list[str] = []
    for done, pair in enumerate(pairs):
        report("values", done, len(pairs))
        for role in ROLES:
            name, name_there = getattr(pair.norm, role), getattr(pair.reference, role)
            if name is None or name_there is None:
                if name_there:
                    is_neutral = _is_neutral(
                        held_there.of(name_there), role, convention(reference, pair.reference.path)
                    )
                    (neutral if is_neutral else missing).append(name_there)
                if name:
                    is_neutral = _is_neutral(held.of(name), role, convention(port, pair.norm.path))
                    (spare if is_neutral else extra).append(name)
                continue
            found.append(_value(pair, role, _relation(held, held_there, name, name_there)))
    found = _with_origins(found, held, held_there, theirs.norms)
    found, factors = _with_folds(found, port, reference, held, held_there, report)
    found = _with_kind([_judged(each, port, reference) for each in found])
    paired = {id(each) for pair in pairs for each in (pair.norm, pair.reference)}
    missing += [name for norm in theirs.norms if id(norm) not in paired for name in _names(norm)]
    alone = [norm for norm in ours.norms if id(norm) not in paired]
    extra += [name for norm in alone if norm.is_named for name in _names(norm)]
    unsure = [name for norm in alone if not norm.is_named for name in _names(norm)]
    taken = {each.name for each in found}
    running = compare_running(port, reference, {each.path: each.reference_path for each in found})
    batch_norms = compare_folded(port, reference, running)
    inside = {each.path for each in batch_norms}
    running = tuple(each for each in running if each.reference_path not in inside)
    found = [each for each in found if each.reference_path not in inside]
    told = {name for each in batch_norms for name in each.names}
    missing, extra = ([name for name in names if name not in told] for names in (missing, extra))
    statistics = {name for each in running for name in each.names} | told
    left = [name for name in ours.others if name not in taken and name not in statistics]
    left_there = [name for name in theirs.others if name not in statistics]
    others = compare_others(port, reference, left, left_there, report, factors)
    notes = [
        f"{shortened(names)}: {why}"
        for names, why in (
            (neutral, "the port has none, and the reference's changes nothing"),
            (spare, "the reference has none, and the port's changes nothing"),
            (unsure, "only in the port; no name says that it is a norm"),
        )
        if names
    ]
    kept = {name: where for name in (*missing, *others.missing) if (where := elsewhere(port, name))}
    kept |= {name: where for name in extra if (where := elsewhere(reference, name))}
    return Values(
        port=port.name,
        reference=reference.name,
        tensors=tuple(found),
        missing=tuple(name for name in missing if name not in kept),
        extra=tuple(name for name in extra if name not in kept),
        left_out={name: reason for name, reason in ours.left_out.items() if name not in taken},
        others=replace(
            others,
            missing=tuple(name for name in others.missing if name not in kept),
            undecided=tuple(name for name in others.undecided if name not in kept),
        ),
        elsewhere=kept,
        packed={**reference.packed, **port.packed},
        running=running,
        batch_norms=batch_norms,
        holding=tuple(factors),
        notes=(*port.notes, *reference.notes, *notes),
    )


def _is_neutral(values: Tensor, role: Role, known: Convention | None) -> bool:
    """Whether a norm computes the same without a vector: a bias of zeros, or a gain that multiplies by one."""
    if role == "bias":
        return bool((values == 0).all())
    return known is not None and bool((values + known.adds == 1).all())


def _names(norm: NormTensors) -> list[str]:
    return [name for name in (norm.weight, norm.bias) if name is not None]


def _relation(held: _Vectors, held_there: _Vectors, name: str, name_there: str) -> Relation:
    one, other = held.of(name), held_there.of(name_there)
    if one.shape != other.shape:
        return Relation(kind="different", reason=f"it has {len(one)} numbers, the reference {len(other)}")
    return relation(one, other, held.dtype(name), held_there.dtype(name_there))


def _value(pair: TensorPair, role: Role, found: Relation) -> TensorValue:
    return TensorValue(
        path=pair.norm.path,
        reference_path=pair.reference.path,
        role=role,
        name=getattr(pair.norm, role),
        reference_name=getattr(pair.reference, role),
        paired_by=pair.paired_by,
        relation=found,
        verdict="",
        is_right=None,
    )


def _with_origins(
    found: Sequence[TensorValue], held: _Vectors, held_there: _Vectors, norms: Sequence[NormTensors]
) -> list[TensorValue]:
    """The tensors; of those that are another norm's it is said whose."""
    made: dict[str, Relation] = {}
    for role in ROLES:
        strangers = {each.name: each for each in found if each.role == role and each.relation.kind == "different"}
        if not strangers:
            continue
        names = {norm.path: name for norm in norms if (name := getattr(norm, role)) is not None}
        made |= origins(
            {name: (held.of(name), held.dtype(name)) for name in strangers},
            {path: (held_there.of(name), held_there.dtype(name)) for path, name in names.items()},
            {name: each.reference_path for name, each in strangers.items()},
        )
    return with_layer_order([replace(each, relation=made.get(each.name, each.relation)) for each in found])


def _with_folds(
    found: Sequence[TensorValue],
    port: Weights,
    reference: Weights,
    held: _Vectors,
    held_there: _Vectors,
    report: Progress,
) -> tuple[list[TensorValue], dict[str, Tensor]]:
    """The tensors; of gains that are one number or have other values it is said whether their readers hold the rest.

    Beside them, the factors of the columns of those readers, or of their rows, by their names in the port.
    """
    moved = [each.name for each in found if each.role == "weight" and each.relation.kind in ("constant", "different")]
    if not moved:
        return list(found), {}
    factors: dict[str, Tensor] = {}
    readers = readers_of(reference)
    kept = {kind_of(each.path) for each in found if each.role == "weight" and each.relation.kind in ("equal", "offset")}
    made = []
    for each in found:
        if each.name in moved:
            report("readers", moved.index(each.name), len(moved))
            ours, theirs = convention(port, each.path), convention(reference, each.reference_path)
            left = held.of(each.name) + (ours.adds if ours else 0.0)
            gain = held_there.of(each.reference_name) + (theirs.adds if theirs else 0.0)
            if left.shape == gain.shape and not bool(((left == 0) & (gain != 0)).any()):
                factor = torch.where(left == 0, 1.0, gain / left)
                asked = (port, reference, readers, each.reference_name, factor)
                is_constant = each.relation.kind == "constant"
                fold = folding(*asked) if is_constant or begins(*asked) else None
                if fold is not None and (is_constant or fold.is_folded):
                    factors |= dict.fromkeys(fold.held, factor) | dict.fromkeys(fold.held_in_rows, factor[:, None])
                    is_initial = bool((left == 1).all())
                    each = replace(each, relation=_folded(each, fold, is_initial=is_initial, kept=kept))
        made.append(each)
    folded = {
        each.path: each.reference_name for each in made if each.role == "weight" and each.relation.kind == "folded"
    }
    for place, each in enumerate(made):
        if each.role == "bias" and each.path in folded and each.relation.constant == 0:
            bias = held_there.of(each.reference_name)
            is_held = holds_bias(port, reference, readers, folded[each.path], bias)
            outcomes: dict[bool | None, str] = {
                True: "folded into the biases of its readers",
                False: "lost: its readers' biases do not hold it",
            }
            said = outcomes.get(is_held, "whether its readers' biases hold it is not known")
            kind, reason = _FOLDED[is_held], f"{each.relation.words}: {said}"
            made[place] = replace(each, relation=replace(each.relation, kind=kind, reason=reason))
    return made, factors


def _folded(each: TensorValue, fold: Folding, *, is_initial: bool, kept: Collection[str]) -> Relation:
    """The relation of a gain whose readers were asked for the rest of it."""
    if each.relation.kind != "constant":
        return replace(each.relation, kind="folded", reason=f"other values, and the rest is {fold.words}")
    words, kind = f"{each.relation.words}: {fold.words}", _FOLDED[fold.is_folded]
    if fold.is_folded is not True and not fold.is_seen and kind_of(each.path) in kept:
        kind = "constant"
    if kind == "constant":
        start = ", as initialised" if is_initial else ""
        why = f" ({fold.words})" if fold.is_folded is False else "; others of its kind kept theirs"
        words = f"{each.relation.words}{start}: the trained gain is lost{why}"
    return replace(each.relation, kind=kind, reason=words)


def _judged(value: TensorValue, port: Weights, reference: Weights) -> TensorValue:
    """The value with what it means to who loads the port. A bias is added as it is stored, by every runtime."""
    if value.role == "bias":
        is_right = {"equal": True, "folded": True, "undecided": None}.get(value.relation.kind, False)
        return replace(value, is_right=is_right)
    conventions = convention(port, value.path), convention(reference, value.reference_path)
    verdict, is_right = judged(value.relation, *conventions, port.runtime)
    return replace(value, verdict=verdict, is_right=is_right)


def _with_kind(found: Sequence[TensorValue]) -> list[TensorValue]:
    """The tensors; one that several relations fit takes the one that all others of its kind have, and says so."""
    decided: dict[tuple[Role, str], dict[tuple[Any, ...], list[TensorValue]]] = defaultdict(lambda: defaultdict(list))
    for each in found:
        if each.relation.kind in ("equal", "offset"):
            decided[(each.role, kind_of(each.path))][(each.relation.kind, each.relation.constant)].append(each)
    made = []
    for each in found:
        others = decided.get((each.role, kind_of(each.path)), {})
        fitting = {(one.kind, one.constant) for one in each.relation.candidates}
        if each.relation.kind == "undecided" and len(others) == 1 and (alike := next(iter(others))) in fitting:
            like = others[alike]
            words = "the other of its kind is" if len(like) == 1 else f"the other {len(like)} of its kind are"
            reason = f"{each.relation.reason}; {words} {like[0].relation.words}"
            relation_ = replace(each.relation, reason=reason, candidates=each.relation.candidates)
            verdict = f"{words} {like[0].relation.words}" + (f": {like[0].verdict}" if like[0].verdict else "")
            each = replace(each, relation=relation_, verdict=verdict, is_right=like[0].is_right)
        made.append(each)
    return made
