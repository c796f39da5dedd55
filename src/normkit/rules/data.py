"""Group F, the data: inputs that are not finite, out of scale or constant, batches that repeat, wrong labels."""

from __future__ import annotations

from collections.abc import Callable

from normkit.rules.feed import LABELS_SEEN, LARGE, SAME_SHARE, STUCK, SUDDEN, flaws
from normkit.rules.rule import NO_RUN, Facts, Hit, NotChecked, Outcome, Rule, worst
from normkit.text import percent

# Fewer may be alike by chance, as a token that begins each text.
_FEWEST_TOKENS = 8


def _holds(*kinds: str, needs: str = "batch digest") -> Callable[[Facts], Outcome]:
    """A check for these flaws of the data, the earliest first."""

    def check(facts: Facts) -> Outcome:
        training = facts.training
        if training is None:
            return (_one_token(facts) if "constant" in kinds else None) or NO_RUN
        if not any(series.quantity == needs for series in training.series):
            return NotChecked(
                "no batch was seen" if needs == "batch digest" else "no labels of a cross-entropy were seen"
            )
        found = [flaw for flaw in flaws(training) if flaw.kind in kinds]
        if not found:
            return None
        return Hit(
            severity=worst([flaw.severity for flaw in found]),
            sites=(),
            measured=found[0].measured,
            evidence=tuple(f"from step {flaw.step} on: {flaw.measured}" for flaw in found),
        )

    return check


def _one_token(facts: Facts) -> Hit | None:
    """An inspection on a text of one token, again and again."""
    if facts.model.distinct != 1 or facts.model.tokens < _FEWEST_TOKENS:
        return None
    return Hit(
        severity="warning",
        sites=(),
        measured=f"all {facts.model.tokens} tokens of the text are the same token",
        evidence=(
            "all rows are nearly alike: what is said of activations, logits, headroom and idle blocks is said of this "
            "one token, and of no other text",
        ),
    )


_LOOK = "print the first elements of the batch of that step, as the model is given it"

RULES = (
    Rule(
        id="F16",
        title="The input is out of range",
        severity="error",
        threshold=(
            f"NaN or infinity in what the model is fed (error); what is no ids: rms {SUDDEN:g} times its usual at once "
            f"(error), or above {LARGE:g} in most steps (warning; error in a run that broke)"
        ),
        source="prs-eth/Marigold#111 (NaN), BVLC/caffe#409 (a data set of one's own)",
        why=(
            "Everything behind the input follows its scale until the first norm, and so do the gradients of the first "
            "weights: what then breaks looks like a learning rate that is too high."
        ),
        remedy=(
            "standardize the input, with the statistics of the training data",
            "look for units, and for broken files",
        ),
        confirm=_LOOK,
        check=_holds("not finite", "out of scale"),
        looks_at=("run",),
    ),
    Rule(
        id="F17",
        title="The input is constant",
        severity="error",
        threshold=(
            "one value in a whole sample of a batch, or two where there were 16 (warning; error from 4 steps on); of "
            f"an inspection: {_FEWEST_TOKENS} tokens or more that are all the same (warning)"
        ),
        source="batches that make a run break: Chowdhery et al. 2022, arXiv:2204.02311",
        why="A batch without content has nothing to learn from: the loss may even fall, and what was learnt is lost.",
        remedy=(
            "look at what the loader returns from that step on: padding, a file that ended, a dead worker",
            "of an inspection: give a text, and look at what the tokenizer made of it",
        ),
        confirm=_LOOK,
        check=_holds("constant"),
        looks_at=("run",),
    ),
    Rule(
        id="F18",
        title="The same batch comes again and again",
        severity="error",
        threshold=(
            f"the last {STUCK} steps or more on one batch, four times as many as any batch before had (error); all "
            "steps on one batch (note)"
        ),
        source="Trusted-AI/adversarial-robustness-toolbox#728; what is repeated is memorized: arXiv:2107.06499",
        why=(
            "The model learns that batch by heart, and its loss says nothing any more. All steps on one batch are "
            "also how one tries whether a model can learn at all: then it is meant."
        ),
        remedy=("see that the loop takes the next batch in each step, and that no seed is set within the loop",),
        confirm="the digest of the batch is another in each step",
        check=_holds("repeated"),
        looks_at=("run",),
    ),
    Rule(
        id="F19",
        title="The labels are wrong",
        severity="error",
        threshold=(
            f"in 4 steps or more {percent(SAME_SHARE)} of the labels are the input at their own place, the one before "
            f"or the next but one (error); {LABELS_SEEN} labels or more, to the end of the run, all the same (warning)"
        ),
        source="huggingface/transformers#32944 (shifted twice) and #27517 (not shifted)",
        why=(
            "A label that stands in the input already asks the model to copy it, and a constant one asks for nothing: "
            "the loss falls far below what language allows. One that is shifted twice has a token left out."
        ),
        remedy=(
            "the label of place t is the input of place t + 1: shift once, in the loop or in the model",
            "look at what the labels are made of",
        ),
        confirm="print one row of inputs above its labels, as the loss is given them",
        check=_holds("shifted labels", "constant labels", needs="labels"),
        looks_at=("run",),
    ),
)
"""The rules of this group, in order."""
