"""`convert` and `revert`: what of a model changes, what does not, and what is refused."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from normkit import layers, specs
from normkit.conversion import swapping
from normkit.conversion.swapping import convert, revert
from normkit.errors import KindError, ModelError, UseError
from normkit.kernels import cpu

pytestmark = pytest.mark.slow


class Block(nn.Module):
    """A norm of each kind of class, one of them used twice, one function call."""

    def __init__(self, n: int = 32) -> None:
        super().__init__()
        self.first = nn.LayerNorm(n, eps=1e-6)
        self.second = LlamaRMSNorm(n)
        self.third = nn.RMSNorm(n)
        self.again = self.second
        self.linear = nn.Linear(n, n)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.dropout(self.linear(self.first(x)))
        x = x + self.third(self.again(self.second(x)))
        return F.layer_norm(x, x.shape[-1:])


def block() -> Block:
    model = Block()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.first.weight.requires_grad_(False)
    return model.eval()


def test_norms_are_swapped_and_numbers_stay():
    model, x = block(), torch.randn(4, 5, 32)
    expected = model(x)
    report = convert(model)
    assert [norm.path for norm in report.swapped] == ["first", "second", "third"]
    assert report.swapped[1].others == ("again",)
    assert [type(norm) for norm in (model.first, model.third)] == [layers.LayerNorm, layers.RMSNorm]
    assert [norm.spec for norm in report.swapped] == [
        specs.TORCH_LAYER_NORM.replace(eps=1e-6),
        specs.LLAMA,
        specs.TORCH_RMS_NORM,
    ]
    assert report.left_alone == ()
    # Four norms one after the other, each within a few epsilons.
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    assert revert(model) == ("first", "second", "third")
    assert [type(module) for module in (model.first, model.second, model.third)] == [
        nn.LayerNorm,
        LlamaRMSNorm,
        nn.RMSNorm,
    ]
    assert torch.equal(model(x), expected)


def test_all_else_is_as_it_was():
    model = block()
    model.second.train()
    parameters, modules, state = dict(model.named_parameters()), dict(model.named_modules()), list(model.state_dict())
    flags = [(parameter.requires_grad, parameter.dtype, parameter.device) for parameter in parameters.values()]
    generator = torch.get_rng_state()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    for act in (convert, revert):
        act(model)
        assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
        assert all(modules[path] is module for path, module in model.named_modules())
        assert model.again is model.second
        assert list(model.state_dict()) == state
        assert [
            (parameter.requires_grad, parameter.dtype, parameter.device) for parameter in model.parameters()
        ] == flags
        assert model.second.training
        assert not model.first.training
        assert torch.equal(torch.get_rng_state(), generator)
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.is_grad_enabled()


def test_hooks_fire_once_before_and_after():
    model, seen = block(), []
    norm = model.second
    norm.register_forward_pre_hook(lambda *_: seen.append("before"))
    norm.register_forward_hook(lambda *_: seen.append("after"))
    norm.register_full_backward_hook(lambda *_: seen.append("backward"))
    norm.register_state_dict_post_hook(lambda *_: seen.append("state"))
    norm.weight.register_hook(lambda _: seen.append("gradient"))
    x = torch.randn(3, 32, requires_grad=True)
    for act in (lambda _: None, convert, revert):
        act(model)
        seen.clear()
        norm(x).sum().backward()
        norm.state_dict()
        assert sorted(seen) == sorted(["before", "after", "gradient", "backward", "state"])


def test_hooks_of_a_converted_model_are_kept_by_revert():
    model, seen = block(), []
    convert(model)
    model.first.register_forward_hook(lambda *_: seen.append("after"))
    model.first.train()
    revert(model)
    model.first(torch.randn(2, 32))
    assert seen == ["after"]
    assert model.first.training


def test_revert_keeps_the_parameters_of_now():
    model = block()
    convert(model)
    model.to(torch.bfloat16)
    model.first.weight = nn.Parameter(torch.full((32,), 3.0, dtype=torch.bfloat16))
    revert(model)
    assert model.first.weight.dtype == torch.bfloat16
    assert torch.equal(model.first.weight, torch.full((32,), 3.0, dtype=torch.bfloat16))
    y = model.first(torch.randn(2, 32, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16


def test_a_copy_of_a_converted_model_goes_back_alone():
    model, x = block(), torch.randn(3, 32)
    expected = model(x)
    convert(model)
    twin = copy.deepcopy(model)
    assert revert(twin) == ("first", "second", "third")
    assert torch.equal(twin(x), expected)
    assert type(model.first) is layers.LayerNorm


def test_a_state_dict_goes_through_a_file():
    model, other, file = block(), block(), io.BytesIO()
    expected = model(x := torch.randn(3, 32))
    convert(model)
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), expected)


def test_the_second_time_nothing_is_done():
    model = block()
    convert(model)
    report = convert(model)
    assert report.swapped == ()
    assert {left.path: left.reason for left in report.left_alone} == dict.fromkeys(
        ["first", "second", "third"], "it is normkit's already"
    )
    assert len(revert(model)) == 3
    assert revert(model) == ()


def test_revert_leaves_layers_that_were_made_so():
    model = nn.Sequential(layers.LayerNorm(8), nn.LayerNorm(8))
    convert(model)
    assert revert(model) == ("1",)
    assert [type(norm) for norm in model] == [layers.LayerNorm, nn.LayerNorm]


def test_a_norm_by_itself_is_a_model():
    norm = nn.LayerNorm(8)
    report = convert(norm)
    assert [swapped.path for swapped in report.swapped] == [""]
    assert "1 norm swapped" in str(report)
    assert revert(norm) == ("",)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("inputs", ["tensor", "tuple", "dict"])
def test_inputs_show_calls_of_functions(inputs):
    model, x = block(), torch.randn(4, 5, 32)
    given = {"tensor": x, "tuple": (x,), "dict": {"x": x}}[inputs]
    model.dropout.train()
    report = convert(model, given)
    assert len(report.swapped) == 3
    assert [(left.path, left.class_name) for left in report.left_alone] == [(":layer_norm", "layer_norm")]
    assert "there is no module to swap" in report.left_alone[0].reason
    assert model.dropout.training


def test_a_norm_that_the_inputs_do_not_reach_is_tried_on_its_own():
    model = block()
    model.unused = nn.LayerNorm(16)
    report = convert(model, torch.randn(4, 5, 32))
    assert [norm.path for norm in report.swapped] == ["first", "second", "third", "unused"]


def test_a_scripted_model_is_left_alone():
    model = torch.jit.script(nn.Sequential(nn.LayerNorm(8)))
    report = convert(model)
    assert [(left.path, left.reason.split(";")[0]) for left in report.left_alone] == [
        ("", "it is compiled by torch.jit")
    ]
    assert model(torch.randn(2, 8)).shape == (2, 8)


def test_parameters_given_to_functional_call_are_used():
    model, x = block(), torch.randn(3, 32)
    convert(model)
    given = {"second.weight": torch.zeros(32)}
    assert torch.equal(
        torch.func.functional_call(model.second, {"weight": given["second.weight"]}, x), torch.zeros(3, 32)
    )


def test_a_running_average_is_not_moved_by_the_look_at_a_model():
    model = nn.Sequential(nn.BatchNorm1d(16), nn.LayerNorm(16))
    before = copy.deepcopy(model.state_dict())
    report = convert(model, torch.randn(8, 16))
    assert [norm.path for norm in report.swapped] == ["1"]
    assert report.left_alone[0].reason.startswith("batch: ")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_raises_midway_leaves_the_model_as_it_was(monkeypatch):
    model, x = block(), torch.randn(3, 32)
    expected, swap, count = model(x), swapping.swap, []

    def failing(module, formula):
        count.append(module)
        if len(count) == 3:
            raise KeyboardInterrupt
        swap(module, formula)

    monkeypatch.setattr(swapping, "swap", failing)
    with pytest.raises(KeyboardInterrupt):
        convert(model)
    assert type(model.first) is nn.LayerNorm
    assert type(model.second) is LlamaRMSNorm
    assert torch.equal(model(x), expected)


def test_what_raises_midway_leaves_what_was_converted_before(monkeypatch):
    model = block()
    convert(model.first)
    before, swap = type(model.second), swapping.swap

    def failing(module, formula):
        swap(module, formula)
        raise KeyboardInterrupt

    monkeypatch.setattr(swapping, "swap", failing)
    with pytest.raises(KeyboardInterrupt):
        convert(model)
    assert type(model.first) is layers.LayerNorm
    assert type(model.second) is before
    assert revert(model) == ("first",)


def test_what_only_wraps_a_norm_keeps_its_own_forward():
    class Counting(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm, self.calls = norm, 0

        def forward(self, x):
            self.calls += 1
            return self.norm(x)

    for norm in (nn.LayerNorm(32), LlamaRMSNorm(32)):
        model, x, seen = nn.Sequential(Counting(norm)), torch.randn(4, 32), []
        norm.register_forward_hook(lambda *_, seen=seen: seen.append("after"))
        for inputs in (None, x):
            assert [swapped.path for swapped in convert(model, inputs).swapped] == ["0.norm"]
            calls = model[0].calls
            seen.clear()
            model(x)
            assert model[0].calls == calls + 1
            assert seen == ["after"]
            revert(model)


def test_compiled_parts_are_looked_at_uncompiled():
    compiled = []

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph.forward

    model = nn.Sequential(torch.compile(nn.LayerNorm(32), backend=backend, fullgraph=True), nn.Linear(32, 32))
    x = torch.randn(4, 32)
    expected = model(x)
    assert len(compiled) == 1
    assert [norm.path for norm in convert(model, x).swapped] == ["0._orig_mod"]
    assert len(compiled) == 1
    torch.testing.assert_close(model(x), expected)
    # The swap is seen by what is compiled.
    assert len(compiled) == 2


def test_the_default_device_is_not_asked():
    # Any other than the CPU will do; meta is there everywhere.
    model, x = block(), torch.randn(4, 5, 32)
    with torch.device("meta"):
        for inputs in (None, x):
            assert len(convert(model, inputs).swapped) == 3
            revert(model)
        assert torch.empty(1).is_meta


def test_a_forward_that_is_set_on_the_object_is_left_alone():
    model = block()
    model.second.forward = model.second.forward
    report = convert(model)
    assert [norm.path for norm in report.swapped] == ["first", "third"]
    assert report.left_alone[0].path == "second"
    assert "its forward is set on the object" in report.left_alone[0].reason


def test_progress_is_told():
    told = []
    convert(block(), progress=lambda *step: told.append(step))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1] == ("norms", 6, 6)


def test_bad_models_are_refused_in_one_line():
    with pytest.raises(KindError, match=r"^convert: model must be a torch\.nn\.Module, got str$"):
        convert("gpt2")
    with pytest.raises(KindError, match=r"^revert: model must be a torch\.nn\.Module, got NoneType$"):
        revert(None)
    with pytest.raises(ModelError, match=r"^convert: 0\.weight is on the meta device .*load the weights first$"):
        convert(nn.Sequential(nn.LayerNorm(8, device="meta")))
    with pytest.raises(ModelError, match=r"^convert: the model does not run on these inputs \(.*give a tensor"):
        convert(block(), torch.randn(3, 7))


def test_offloaded_weights_are_refused_for_what_they_are():
    """They are on the meta device between calls; "load the weights first" sent people the wrong way."""
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(nn.Sequential(nn.LayerNorm(8)), execution_device="cpu")
    with pytest.raises(
        UseError, match=r"^convert: 0\.weight is offloaded by accelerate; convert before cpu_offload or "
    ):
        convert(model)
    model, x = nn.Sequential(nn.LayerNorm(8)), torch.randn(3, 8)
    convert(model)
    expected = model(x)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert type(model[0]) is layers.LayerNorm
    assert torch.equal(model(x), expected)


def test_sharded_parameters_are_refused(tmp_path):
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = fully_shard(nn.Sequential(nn.LayerNorm(8)), mesh=distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(
            UseError, match=r"^convert: 0\.weight is sharded \(a DTensor\); convert before fully_shard$"
        ):
            convert(model)
    finally:
        distributed.destroy_process_group()


def test_the_report_is_plain_json_and_a_short_table():
    model = nn.Sequential(nn.LayerNorm(16), nn.LayerNorm(16), nn.GroupNorm(2, 16), nn.BatchNorm2d(16))
    report = convert(model)
    # Where no kernels are built, plain torch computes all of them.
    if cpu.load() is None:
        assert report.counts == {"swapped": 2, "slow": 0, "left_alone": 2}
        assert "no kernel computes it" in report.left_alone[0].reason
    else:
        assert report.counts == {"swapped": 3, "slow": 3, "left_alone": 1}
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["swapped"][0]["spec"] == specs.TORCH_LAYER_NORM.to_json()
    assert [check["setting"] for check in plain["swapped"][0]["checks"]] == [
        "float32",
        "bfloat16 under autocast",
        "float16 under autocast",
    ]
    computed = "kernel" if cpu.load() is None else "plain torch: "
    assert all(norm["computed_by"].startswith(computed) for norm in plain["swapped"])
    text = str(report)
    assert "2 x  LayerNorm" in text
    assert max(map(len, text.splitlines())) < 200
