"""How large the numbers of a model become, and how often its stream is halved to fit float16."""

from __future__ import annotations

import pytest
import torch

from folding_cases import graph_of
from normkit.checkpoint import fold as fold_checkpoint
from normkit.checkpoint.headroom import LARGEST, headroom
from normkit.checkpoint.loading import load
from normkit.checkpoint.memory import fold
from normkit.checkpoint.opening import open_checkpoint
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


@pytest.mark.exhaustive
@pytest.mark.slow
def test_gemma_3_overflows_float16_and_fits_after_two_halvings(real_models, tmp_path):
    source, ids = real_models / "gemma3", torch.tensor([[2, *b"def norm(x):"]])
    with open_checkpoint(source) as opened:
        found = headroom(load(source, dtype="float32"), opened.graph, [{"input_ids": ids}])
    assert found.stream > LARGEST > found.other
    fold_checkpoint(source, tmp_path / "folded", operations=["scale"], halvings=found.halvings, dtype="float32")
    with torch.no_grad():
        before, after = (load(folder, dtype="float16")(ids).logits for folder in (source, tmp_path / "folded"))
        exact = load(source, dtype="float32")(ids).logits
    assert not bool(before.isfinite().all())
    # 18 blocks in float16, whose last place is 2^-10 of a number: 0.1 of 33 was measured.
    assert float((after.float() - exact).abs().max()) < 0.02 * float(exact.abs().max())
