"""The statistics of what enters the readers of each norm: against the tensors themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from folding_cases import graph_of
from normkit.checkpoint.activations import ActivationMeter, measure_activations
from normkit.checkpoint.migration import asked_scales
from normkit.errors import InputError, KindError
from normkit.inspection.inspecting import inspect
from planned_models import model_of
from tiny_models import tiny


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_they_are_those_of_what_the_readers_take_over_all_batches(family):
    model, inputs = tiny(family)
    reversed_ids = {key: value.flip(-1) for key, value in inputs.items()}
    taken: dict[str, list[torch.Tensor]] = {}
    graph = graph_of(model)
    handles = []

    def take(to):
        return lambda _module, given: taken.setdefault(to, []).append(*given)

    for linear in graph.linears:
        if linear.reads in {norm.gives for norm in graph.norms}:
            module = model.get_submodule(linear.name)
            handles.append(module.register_forward_pre_hook(take(linear.reads)))
    with torch.no_grad():
        for batch in (inputs, reversed_ids):
            model(**batch)
    for handle in handles:
        handle.remove()
    found = measure_activations(model, [inputs, reversed_ids])
    assert set(found.largest) == set(found.mean) == {norm.name for norm in graph.norms if norm.gives in taken}
    for norm in graph.norms:
        if norm.gives in taken:
            rows = torch.cat([each.flatten(0, -2) for each in taken[norm.gives]]).abs().double()
            assert torch.equal(found.largest[norm.name], rows.amax(0).float())
            assert torch.allclose(found.mean[norm.name], rows.mean(0).float(), rtol=2e-7)
    assert found.rows == 2 * inputs["input_ids"].numel()


def test_the_file_is_the_same_each_time_and_can_be_given_to_migrate(tmp_path: Path):
    model, inputs = tiny("llama")
    found = measure_activations(model, [inputs], metadata={"text": "drawn"})
    path = found.save(tmp_path / "new" / "a.safetensors")
    assert path.read_bytes() == found.save(tmp_path / "b.safetensors").read_bytes()
    with safe_open(path, "pt") as file:
        assert file.metadata()["text"] == "drawn"
        assert file.metadata()["rows"] == str(found.rows)
        assert torch.equal(file.get_tensor("model.norm.max"), found.largest["model.norm"])
    scales = asked_scales(path, alpha=0.5)
    assert torch.equal(scales.vectors["model.norm.mean"], found.mean["model.norm"].double())


def test_an_inspection_measures_the_same_in_its_run_on_the_batches():
    model, inputs = tiny("llama")
    batches = [inputs, {key: value.flip(-1) for key, value in inputs.items()}]
    alone, meter, runs = measure_activations(model, batches), ActivationMeter(model), []
    counted = model.lm_head.register_forward_hook(lambda *_: runs.append(len(meter._handles)))
    inspect(model, batches, during=meter)
    counted.remove()
    assert [num for num in runs if num] == [len(alone.largest)] * len(batches)
    assert len(runs) > len(batches)
    found = meter.statistics()
    assert found.rows == alone.rows
    for name, values in alone.largest.items():
        assert torch.equal(found.largest[name], values)
        assert torch.equal(found.mean[name], alone.mean[name])
    assert not meter._handles


def test_what_cannot_be_measured_is_one_line():
    model, inputs = tiny("llama")
    with pytest.raises(InputError, match="expected at least one batch"):
        measure_activations(model, [])
    with pytest.raises(KindError, match="expected a model of transformers"):
        measure_activations(torch.nn.Linear(2, 2), [])
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(torch.nan)
    with pytest.raises(InputError, match=r"gives NaN or infinity in torch\.float64; measure the model in float32"):
        measure_activations(model, [inputs])
    assert not model_of("llama").model.norm._forward_hooks
