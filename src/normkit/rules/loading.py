"""Group E: a checkpoint that does not fit the model that its configuration asks for."""

from __future__ import annotations

from normkit.checkpoint.misfits import Misfit
from normkit.rules.facts import Facts
from normkit.rules.rule import Case, NotChecked, Outcome, Rule, hit
from normkit.text import counted


@Rule(
    id="E10",
    title="The checkpoint and the model do not fit",
    severity="error",
    threshold=(
        "a list of layers that has more or fewer members in the file than in the model (error); a head that is not "
        "tied, and whose weights the file of the whole model lacks (warning)"
    ),
    source="huggingface/transformers#5403 (left-over weights are a warning there), #43429 (a head that is not tied)",
    why=(
        "Layers that config.json does not ask for are left out without an error, and those that the file lacks are "
        "drawn at random: the model computes something else than it was trained to. Without its head it gives no "
        "logits and no loss."
    ),
    remedy=(
        "take config.json and the weights from the same model, or download both again",
        "set the number of layers, as num_hidden_layers, to that of the file",
        "if the head shares the table of embeddings, set tie_word_embeddings to true",
    ),
    confirm="the second value of from_pretrained(folder, output_loading_info=True)",
)
def parts_that_do_not_fit(facts: Facts) -> Outcome:
    """Layers that only the file or only the model has, and heads without weights."""
    if facts.misfits is None:
        return NotChecked("only where normkit loads a model, the file is compared with it")
    cases, measured = [], []
    for part in facts.misfits:
        case, words = _case(part)
        cases.append(case)
        measured.append(words)
    return hit(cases, "; ".join(measured), "list")


def _case(part: Misfit) -> tuple[Case, str]:
    """The case, and what was measured."""
    if part.is_head:
        words = "config.json does not tie it to the table of embeddings, and the file has no weights of it"
        return Case(part.path, "warning", words), "the head has no weights"
    change = part.in_file - part.in_model
    done = "not run" if change > 0 else "drawn at random"
    words = f"config.json asks for {part.in_model}, the file has {part.in_file}"
    number = counted(abs(change), "layer")
    return Case(part.path, "error", words, abs(change)), f"{number} {'is' if abs(change) == 1 else 'are'} {done}"


RULES = (parts_that_do_not_fit,)
"""The rules of this file."""
