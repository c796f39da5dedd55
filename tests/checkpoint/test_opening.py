"""A folder opened to be planned on, and what a plan makes of its configuration."""

from __future__ import annotations

import pytest

from normkit import demo
from normkit.checkpoint.opening import folded_config, open_checkpoint
from normkit.checkpoint.plan import FoldPlan
from normkit.errors import ModelError


def test_a_folder_is_opened_with_its_graph():
    with open_checkpoint(demo.directory("rmsnorm")) as opened:
        assert opened.graph.architecture == opened.config["architectures"][0] == "LlamaForCausalLM"
        assert len(opened.graph.norms) == 2 * opened.config["num_hidden_layers"] + 1
        assert {norm.weight for norm in opened.graph.norms} <= opened.source.tensors.keys()


def test_the_checkpoint_of_a_class_without_a_head_has_names_without_its_prefix(tmp_path):
    from tiny_models import tiny

    model, _ = tiny("llama")
    model.model.save_pretrained(tmp_path / "body")
    with open_checkpoint(tmp_path / "body") as opened:
        assert opened.graph.returned == {"norm"}
        assert opened.graph.norms[0].name == "layers.0.input_layernorm"


def test_a_path_that_is_no_folder_is_one_line(tmp_path):
    with pytest.raises(ModelError, match="expected the folder of a model"):
        open_checkpoint(tmp_path / "none")


def test_keys_are_set_at_their_depth_and_dropped_and_the_rest_is_left():
    config = {"a": 1, "text_config": {"tie": True, "b": 2}, "clip": None}
    plan = FoldPlan(
        family="x",
        architecture="X",
        operations=("gain",),
        untie=True,
        edits=(),
        config={"tie": False, "text_config.tie": False},
        dropped=("clip", "absent"),
    )
    assert folded_config(config, plan) == {"a": 1, "text_config": {"tie": False, "b": 2}, "tie": False}
    assert config["text_config"] == {"tie": True, "b": 2}
