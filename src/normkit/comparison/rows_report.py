"""Rows of two runs in words: where the first difference is born, and how it grows to the logits."""

from __future__ import annotations

from normkit.comparison.rows import Birth, Rows
from normkit.text import counted, significant


def growth(found: Rows) -> str:
    """How the first difference goes on to the outputs, in one sentence; "" if there is none, or no place after it."""
    steps = [step for step in found.steps if step.where != "at"]
    birth = found.birth
    first = next((place for place, step in enumerate(steps) if birth is not None and step.path == birth.path), None)
    if first is None or first + 1 >= len(steps):
        return ""
    later = steps[first + 1 :]
    between = max(later[:-1], key=lambda step: step.median, default=None)
    parts = [f"by up to {significant(between.median)} at {between.path}"] if between is not None else []
    where = "in the output" if later[-1].path is None else f"at {later[-1].path}"
    parts.append(f"by {significant(later[-1].median)} {where}")
    own = f", {significant(later[-1].units)} times as much as the reference from itself" if later[-1].units else ""
    agree = " The outputs agree within rounding." if found.outputs_agree else ""
    return f"After it the median row differs {', '.join(parts)}{own}.{agree}"


def beginnings(found: Rows) -> tuple[str, ...]:
    """Where the first difference of two runs is, and the verdict; the causes are told with the others."""
    if found.birth is not None:
        return (f"The first difference appears {_place(found.birth)}.",)
    if found.first_bits is not None:
        largest = f"at most by {significant(found.largest)}. It begins {_place(found.first_bits)}."
        verdict = found.verdict or "no more different than rounding explains"
        return (f"Side by side they are {verdict}, {largest}",)
    return (f"Side by side they agree to the bit at {counted(found.compared, 'norm')} and in their output.",)


def _place(birth: Birth) -> str:
    agreed = "agrees to the bit" if birth.agreed == 0 else f"agrees to {significant(birth.agreed)}"
    differs = f"differs by {significant(birth.differs)} in the worst row"
    if birth.where == "at":
        return f"at {birth.path}: its input {agreed}, its output {differs}"
    if birth.where == "after":
        since = f"after {birth.since}, the last norm: what leaves it {agreed}" if birth.since else "where no norm is"
        return f"{since}, the model's output {differs}"
    if birth.since is None:
        return f"before the first norm: the input of {birth.path} {differs}"
    block = {"attention": "in attention", "MLP": "in the MLP", "residual sum": "in the sum with the residual"}
    where = block.get(birth.block, "between two norms")
    return f"{where}: what leaves {birth.since} {agreed}, what enters {birth.path} {differs}"
