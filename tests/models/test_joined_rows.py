"""What a file says of maps and norms that take several rows side by side, of axes that are exchanged on disk, of
factors behind a branch, and of layers that a list counts."""

from __future__ import annotations

import re
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from folding_cases import BAR, config_of, difference, graph_of, plan_of, reasons, results
from normkit.checkpoint.folding import fold
from normkit.checkpoint.loading import load
from normkit.checkpoint.opening import open_checkpoint
from normkit.checkpoint.plan import TensorEdit
from normkit.checkpoint.reader import ModelSource
from normkit.checkpoint.report import norm_mappings
from normkit.errors import ModelError
from normkit.models.expansion import expand
from normkit.models.family import declared_family
from tiny_models import tiny


def expanded(model: Any, **shapes: tuple[int, ...]) -> Any:
    """The graph of a model some of whose tensors have another shape."""
    found = {name: info.shape for name, info in ModelSource(model).tensors.items()}
    changed = {name.replace("__", "."): shape for name, shape in shapes.items()}
    assert changed.keys() <= found.keys()
    return expand(declared_family(model.config.model_type), config_of(model), found | changed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "reader", "times"),
    [
        ("qwen2_vl", "model.visual.merger.mlp.0", 4),
        ("idefics3", "model.connector.modality_projection.proj", 4),
        ("qwen3_next", "model.layers.0.linear_attn.out_proj", 4),
        ("dinov2", "classifier", 2),
    ],
)
def test_a_gain_is_repeated_for_a_map_that_reads_several_rows_side_by_side(family, reader, times):
    model, _ = tiny(family)
    edits = {edit.name: edit for edit in plan_of(model, untie=True).edits}
    edit = edits[f"{reader}.weight"]
    assert isinstance(edit, TensorEdit)
    assert edit.gain is not None
    assert edit.gain.times == times
    assert all(getattr(each, "gain", None) is None or each.gain.times in (None, times) for each in edits.values())
    # Quantizers multiply by a gain once.
    graph = graph_of(model)
    norm = next(each for each in graph.norms if any(_.name == reader for _ in graph.readers(each.gives)))
    named = [
        re.fullmatch(each["norm"].removeprefix("re:"), norm.name) for each in norm_mappings(graph)["norm_mappings"]
    ]
    assert named
    assert not any(named)


def test_rows_side_by_side_are_a_multiple_of_one():
    model, _ = tiny("qwen2_vl")
    message = r"expected model.visual.merger.mlp.0.weight to have a multiple of 24 along axis 1, as .* has 24, got"
    with pytest.raises(ModelError, match=message):
        expanded(model, model__visual__merger__mlp__0__weight=(96, 95))


@pytest.mark.slow
def test_a_norm_of_joined_rows_sees_the_mean_of_each():
    model, _ = tiny("qwen3_vl")
    reason = "normalizes the vision residual joined with its neighbours, and sees the mean of each"
    assert reasons(plan_of(model, operations=["centre"]), "centre")["vision residual"].endswith(reason)
    norm = "model.visual.deepstack_merger_list.0.norm"
    assert reasons(plan_of(model, operations=["rms"]), "rms")[norm].endswith(reason)


@pytest.mark.slow
def test_experts_whose_axes_are_exchanged_on_disk_are_known_by_their_sizes_and_stay_so(tmp_path):
    model, inputs = tiny("qwen3_vl_moe", tied=False)
    model.save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    # As the Hub has them.
    held = {
        name: value.transpose(1, 2).contiguous() if ".experts." in name else value
        for name, value in load_file(file).items()
    }
    save_file(held, file, metadata={"format": "pt"})
    fold(tmp_path / "source", tmp_path / "folded")
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert tuple(held[name].shape) == tuple(model.state_dict()[name].mT.shape) == (6, 32, 40)
    with open_checkpoint(tmp_path / "folded") as opened:
        linear = next(each for each in opened.graph.linears if each.name == name)
        assert opened.source.tensors[name].shape == (6, 32, 40)
    assert (linear.in_axis, linear.out_axis) == (1, 2)
    folded = load(tmp_path / "folded").eval()
    folded.set_experts_implementation("eager")
    assert difference(results(model, inputs), results(folded, inputs)) <= BAR


@pytest.mark.slow
def test_a_factor_behind_a_branch_passes_powers_of_two_and_no_mean():
    model, _ = tiny("dinov2")
    writer = "dinov2.encoder.layer.0.mlp.fc2"
    assert reasons(plan_of(model, operations=["centre"]), "centre")[writer].startswith("the layer scale stands between")
    plan = plan_of(model, operations=["scale"], halvings=2)
    assert not plan.refusals
    assert next(edit for edit in plan.edits if edit.name == f"{writer}.weight").exponent == -2


def test_a_list_counts_layers_as_a_number_does():
    model, _ = tiny("nemotron_h")
    config, shapes = config_of(model), {name: info.shape for name, info in ModelSource(model).tensors.items()}
    assert "num_hidden_layers" not in config
    graph = expand(declared_family("nemotron_h"), config, shapes)
    numbered = {key: value for key, value in config.items() if key != "layers_block_type"} | {"num_hidden_layers": 4}
    assert expand(declared_family("nemotron_h"), numbered, shapes) == graph
    assert len(graph.norms) == 6
    with pytest.raises(ModelError, match="only tensors that"):
        expand(declared_family("nemotron_h"), config | {"layers_block_type": config["layers_block_type"][:3]}, shapes)


@pytest.mark.slow
def test_the_text_model_of_a_paligemma_is_what_its_settings_name():
    kinds = {name: {each.offset for each in graph_of(tiny(name)[0]).norms} for name in ("paligemma", "paligemma_2")}
    assert kinds == {"paligemma": {0.0, 1.0}, "paligemma_2": {0.0, 1.0}}
    counts = [len(graph_of(tiny(name)[0]).norms) for name in ("paligemma", "paligemma_2")]
    assert counts[1] == counts[0] + 4
    model, _ = tiny("paligemma")
    config, shapes = config_of(model), {name: info.shape for name, info in ModelSource(model).tensors.items()}
    config["text_config"]["model_type"] = "gemma3_text"
    with pytest.raises(ModelError, match=r"expected text_config.model_type = 'gemma' or 'gemma2' in a paligemma model"):
        expand(declared_family("paligemma"), config, shapes)
