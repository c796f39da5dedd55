"""How large the numbers of a model become, and how often its stream is halved to fit float16."""

from __future__ import annotations

import pytest
import torch

from folding_cases import graph_of
from normkit.checkpoint.headroom import LARGEST, headroom
from normkit.checkpoint.memory import fold
from normkit.checkpoint.scaling import scaled_spaces
from normkit.errors import InputError
from tiny_models import tiny


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "t5"])
def test_a_planted_overflow_is_measured_and_halved_until_it_fits(family):
    model, inputs = tiny(family)
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table.mul_(3e5 / float(table.abs().max()))
    found = headroom(model, graph_of(model), [inputs])
    largest = []
    graph = graph_of(model)
    for norm in graph.norms:
        if norm.reads in scaled_spaces(graph):
            module = model.get_submodule(norm.module)
            module.register_forward_pre_hook(
                lambda _module, given: largest.append(float(given[0].detach().abs().max()))
            )
    model(**inputs)
    assert found.stream >= max(largest)
    assert found.stream * 2.0**-found.halvings <= LARGEST / 2 < found.stream * 2.0 ** (1 - found.halvings)
    assert f"after {found.halvings} halving" in str(found)
    fold(model, operations=["scale"], halvings=found.halvings, untie=True)
    after = headroom(model, graph_of(model), [inputs])
    assert after.stream == pytest.approx(found.stream * 2.0**-found.halvings, rel=1e-9)
    assert after.halvings == 0
    assert after.other == pytest.approx(found.other, rel=1e-9)


def test_infinity_is_named():
    model, inputs = tiny("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("inf"))
    with pytest.raises(InputError, match=r"gives inf in torch.float64; measure the model in float32"):
        headroom(model, graph_of(model), [inputs])
