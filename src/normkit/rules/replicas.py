"""Group E, many processes: replicated norms that drift apart, gradients never reduced, an observer that is wrong."""

from __future__ import annotations

from normkit.measurement.training import Parameter
from normkit.rules.rule import NO_RUN, Facts, Hit, NotChecked, Outcome, Rule, evidence_lines
from normkit.text import counted

# Beyond the order of a sum: what is reduced is the same to the bit, and a checksum in another order differs by this.
_SPREADS = {"float64": 1e-6, "float32": 1e-6, "bfloat16": 1e-3, "float16": 1e-3}
_VERIFIED = "observer verified"


def _replicas_differ(facts: Facts) -> Outcome:
    """Checksums of what all processes should hold alike: gradients before the step first, as they are the cause."""
    training = facts.training
    if training is None:
        return NO_RUN
    if training.ranks < 2:
        return NotChecked("one process has no replicas")
    unreduced = [each for each in training.parameters if each.gradient_rank_spread > _limit(each)]
    drifted = [each for each in training.parameters if each.rank_spread > _limit(each)]
    if not unreduced and not drifted:
        return None
    concerned = [each for each in training.parameters if each in unreduced or each in drifted]
    # Norms first: where sharded and replicated parameters mix, theirs are the ones forgotten.
    telling = sorted(concerned, key=lambda each: not each.site)
    if unreduced:
        measured = f"gradients of {counted(len(unreduced), 'parameter')} differ between {training.ranks} processes"
    else:
        measured = f"other numbers in some of {training.ranks} processes at {counted(len(drifted), 'parameter')}"
    return Hit(
        severity="error",
        sites=tuple(dict.fromkeys(each.site or each.path for each in concerned)),
        measured=f"{measured}, by up to {max(max(e.gradient_rank_spread, e.rank_spread) for e in concerned):.2g}",
        evidence=evidence_lines([_line(each) for each in telling], "parameter"),
    )


def _limit(parameter: Parameter) -> float:
    return _SPREADS.get(parameter.dtype, 1e-6)


def _line(parameter: Parameter) -> str:
    parts = []
    if parameter.gradient_rank_spread > _limit(parameter):
        parts.append(f"its gradient differs by {parameter.gradient_rank_spread:.2g} before the optimizer's step")
    if parameter.rank_spread > _limit(parameter):
        parts.append(f"it differs by {parameter.rank_spread:.2g} itself")
    return f"{parameter.path} ({parameter.kind}): {', and '.join(parts)}"


def _observer_is_wrong(facts: Facts) -> Outcome:
    """The watch's own pooling must give the right statistics of known numbers."""
    if facts.training is None:
        return NO_RUN
    if facts.training.ranks < 2:
        return NotChecked("one process pools nothing")
    if facts.training.observer.startswith(_VERIFIED):
        return None
    return Hit(
        severity="error",
        sites=(),
        measured=facts.training.observer or "no self-test was run",
        evidence=(
            "uneven shards with shifted means were given to the processes, and what they pooled was held against "
            "float64",
        ),
    )


RULES = (
    Rule(
        id="E7",
        title="Replicas differ between processes",
        severity="error",
        threshold=(
            "checksum of a parameter or its gradient before the step differs between processes that should hold the "
            f"same by more than {_SPREADS['float32']:g} (float32) or {_SPREADS['bfloat16']:g} (16 bits)"
        ),
        source="NVIDIA/Megatron-LM#1446 and #7452, gpt-neox#1257 and #1259",
        why=(
            "Under tensor or sequence parallelism the norms are replicated, but each process sees part of the tokens. "
            "If their gradients are not added up, each copy learns from its own part: the copies drift apart, the "
            "model is no longer one, and its loss stalls without an error."
        ),
        remedy=(
            "sum the gradients of replicated parameters over the processes that share them (all-reduce), or mark them "
            "so that the framework does",
            "broadcast the parameters from one process, as they differ already",
        ),
        confirm="after one step with the reduction in place, the checksums are equal in every process",
        check=_replicas_differ,
        follows=("E8",),
        looks_at=("run",),
    ),
    Rule(
        id="E8",
        title="The watch's own numbers are wrong",
        severity="error",
        threshold="statistics of known uneven, shifted shards within 1e-6 of float64",
        source="NVIDIA/TransformerEngine#3044 (a pooled variance below 0), radixark/miles_diffusion#35",
        why="Every other number here was pooled the same way, so none of them can be trusted.",
        remedy=(
            "check that all processes run the same code, and that the group given is the one that holds the model",
            "report it with the line above: it is a fault of normkit or of the communication library",
        ),
        confirm="the report says: observer verified",
        check=_observer_is_wrong,
        looks_at=("run",),
    ),
)
"""The rules of this group, in order."""
