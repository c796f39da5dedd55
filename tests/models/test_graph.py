"""What a graph answers: who reads, who writes, what is added, what is read at all."""

from __future__ import annotations

import dataclasses

import pytest

from folding_cases import graph_of
from normkit.models.graph import Graph
from tiny_models import tiny


@pytest.fixture(scope="module")
def bert() -> Graph:
    return graph_of(tiny("bert", tied=False)[0])


def test_readers_of_points_and_norms_of_spaces(bert):
    layer = "bert.encoder.layer.0"
    assert [linear.name for linear in bert.readers("state.0")] == [
        f"{layer}.attention.self.{name}" for name in ("query", "key", "value")
    ]
    assert [norm.name for norm in bert.norms_of("mlp sum.0")] == [f"{layer}.output.LayerNorm"]
    assert bert.readers("nowhere") == ()


def test_writers_are_linear_maps_and_tables_and_norms_are_told_apart(bert):
    assert [writer.name for writer in bert.writers("embeddings")] == [
        f"bert.embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")
    ]
    assert [writer.name for writer in bert.writers("mlp sum.0")] == ["bert.encoder.layer.0.output.dense"]
    assert [norm.name for norm in bert.added("mlp sum.0")] == ["bert.encoder.layer.0.attention.output.LayerNorm"]
    assert bert.added("embeddings") == ()


def test_a_space_is_read_by_a_norm_or_a_linear_map_or_is_returned(bert):
    assert bert.is_read("mlp sum.1")
    assert not bert.is_read("attention sum.2")
    assert dataclasses.replace(bert, returned=frozenset({"attention sum.2"})).is_read("attention sum.2")
    post_norm = graph_of(tiny("opt_post_norm", tied=False)[0])
    queries, *_ = post_norm.readers("residual")
    assert queries.name == "model.decoder.layers.0.self_attn.q_proj"


def test_spaces_come_in_the_order_of_the_norms_that_read_them(bert):
    assert bert.spaces == ("embeddings", "attention sum.0", "mlp sum.0", "attention sum.1", "mlp sum.1")
    assert graph_of(tiny("whisper", tied=False)[0]).spaces == ("encoder", "decoder")
