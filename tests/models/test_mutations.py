"""Every reader and every writer that a family's file declares matters: without it, folding fails or says so.

Each `reads` and `writes` is taken out of the file in turn, in each model and each class of the family. Then either the
graph is refused by the name of what is missing, or a fold changes what the model computes. Where neither happens, the
graph itself must say why: nothing may leave the norm that is read, or nothing turns on the mean of what is written.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from folding_cases import BAR, FLAGS, config_of, difference, results
from normkit.checkpoint import opening
from normkit.checkpoint.folding import fold as fold_checkpoint
from normkit.checkpoint.loading import load
from normkit.checkpoint.memory import fold
from normkit.checkpoint.opening import open_checkpoint
from normkit.checkpoint.plan import ALL
from normkit.checkpoint.reader import ModelSource
from normkit.errors import InputError, ModelError
from normkit.models.expansion import expand
from normkit.models.family import Family, declared_family, declared_types
from normkit.models.graph import Graph
from tiny_models import RECIPES, configuration, tiny

pytestmark = pytest.mark.slow

VISIBLE = 1e-9
"""What is wrong by a gain, a bias or a mean of these models shows 1e-3 and more; what is right shows 1e-13 at most."""

Mutation = tuple[int, str, str, str]
"""Index of the part, section, key of the entry, field."""

QUICK = ("gpt2", "gemma2", "modernbert")


def mutations(family: Family) -> Iterator[Mutation]:
    """All that a file says of who reads and who writes; of a norm, what its output is added to."""
    for index, part in enumerate(family.parts):
        for section, fields in (("linear", ("reads", "writes")), ("table", ("writes",)), ("norm", ("writes",))):
            for key, entry in getattr(part, section).items():
                for name in fields:
                    if getattr(entry, name):
                        yield index, section, key, name


def without(family: Family, mutation: Mutation) -> Family:
    """The family whose file lacks one word."""
    index, section, key, name = mutation
    part = family.parts[index]
    entries = dict(getattr(part, section))
    entries[key] = dataclasses.replace(entries[key], **{name: type(getattr(entries[key], name))()})
    parts = list(family.parts)
    parts[index] = dataclasses.replace(part, **{section: entries})
    return dataclasses.replace(family, parts=tuple(parts))


class Case:
    """A model to fold by a changed file, in memory or on disk."""

    def __init__(self, model: Any, inputs: dict[str, Any], folder: Path | None = None) -> None:
        self.model, self.inputs, self.folder = model, inputs, folder
        self.before = results(model, inputs)
        if folder is None:
            self.config = config_of(model)
            self.shapes = {name: info.shape for name, info in ModelSource(model).tensors.items()}
        else:
            model.save_pretrained(folder / "source")
            with open_checkpoint(folder / "source") as opened:
                self.config = opened.config
                self.shapes = {name: info.shape for name, info in opened.source.tensors.items()}

    def graph(self, family: Family) -> Graph:
        """The graph by a file."""
        return expand(family, self.config, self.shapes)

    def error(self) -> float:
        """What a fold by the file of the moment changes of the results."""
        try:
            if self.folder is None:
                folded = copy.deepcopy(self.model)
                fold(folded, operations=ALL)
            else:
                folded = self._folded_on_disk()
        except InputError:
            return 0.0
        return difference(self.before, results(folded, self.inputs))

    def _folded_on_disk(self) -> Any:
        fold_checkpoint(self.folder / "source", self.folder / "folded", operations=ALL)
        try:
            folded = load(self.folder / "folded").eval()
            # The quicker ways of experts know no float64.
            folded.set_experts_implementation(self.model.get_experts_implementation())
            return folded
        finally:
            shutil.rmtree(self.folder / "folded")


def cases(model_type: str, folder: Path) -> Iterator[Case]:
    """Every recipe of a family, what its flags change, its other classes, and the names that it has on disk."""
    recipes = [name for name, recipe in RECIPES.items() if configuration(recipe).model_type == model_type]
    for recipe in recipes:
        yield Case(*tiny(recipe, tied=False if False in RECIPES[recipe].ties else None))
    for recipe, flags in FLAGS:
        if recipe in recipes:
            yield Case(*tiny(recipe, **flags))
    for recipe in recipes:
        for name in declared_family(model_type).classes:
            model, inputs = tiny(recipe, class_name=name)
            if name.endswith("MultipleChoice"):
                inputs = {key: value.unsqueeze(1) for key, value in inputs.items()}
            yield Case(model, inputs)
    for recipe in recipes:
        yield Case(*tiny(recipe, tied=False if False in RECIPES[recipe].ties else None), folder / recipe)


def without_effect(graph: Graph, changed: Graph) -> bool:
    """Whether the graph itself says that what the changed one lacks is of no matter to folding."""
    lost = {
        (kind, old.reads if kind == "reads" else old.writes)
        for old, new in zip([*graph.linears, *graph.tables], [*changed.linears, *changed.tables], strict=True)
        for kind in ("reads", "writes")
        if getattr(old, kind, None) != getattr(new, kind, None)
    }
    return bool(lost) and all(_is_of_no_matter(graph, changed, kind, place) for kind, place in lost)


def _is_of_no_matter(graph: Graph, changed: Graph, kind: str, place: str) -> bool:
    norms = [norm for norm in graph.norms if norm.gives == place]
    if kind == "reads" and norms:
        # Nothing can leave the norm, or there is nothing to leave it.
        return all(
            graph.against_folding(norm, untie=True) or (norm.weight is None and norm.bias is None) for norm in norms
        )
    if kind == "reads":
        # Who reads a space forbids to centre it; another one does so still.
        return changed.against_centring(place) is not None
    # A LayerNorm takes the mean off, whoever wrote it; only for an RMSNorm in its place it must be gone.
    return all(graph.against_rms(norm, untie=True) for norm in graph.norms_of(place))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "model_type", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in declared_types()]
)
def test_without_any_one_reader_or_writer_folding_goes_wrong(model_type, tmp_path, monkeypatch):
    family = declared_family(model_type)
    pending = set(mutations(family))
    explained: set[Mutation] = set()
    for case in cases(model_type, tmp_path):
        if pending <= explained:
            break
        graph = case.graph(family)
        for mutation in sorted(pending - explained):
            changed = without(family, mutation)
            try:
                found = case.graph(changed)
            except ModelError as error:
                pending -= {mutation} if is_named(family, mutation, str(error)) else set()
                continue
            if dataclasses.replace(found, family=family) == graph:
                continue
            with monkeypatch.context() as patch:
                patch.setattr(opening, "declared_family", lambda _, changed=changed: changed)
                error = case.error()
            if error > VISIBLE:
                pending.remove(mutation)
            elif without_effect(graph, found):
                assert error <= BAR
                explained.add(mutation)
    assert pending <= explained


def is_named(family: Family, mutation: Mutation, message: str) -> bool:
    """Whether a message names the entry, or the place that it read or wrote."""
    index, section, key, name = mutation
    named = getattr(getattr(family.parts[index], section)[key], name)
    places = (named,) if isinstance(named, str) else named
    return any(word in message for word in [key, *(_last_word(place) for place in places)] if word)


def _last_word(place: str) -> str:
    """Without the layer that it is in: "state" of "state.{layer}", "norm" of "layers.{layer}.norm"."""
    return [word for word in place.split(".") if not re.fullmatch(r"\d*|{.*}", word)][-1]
