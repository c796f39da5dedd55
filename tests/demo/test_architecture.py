import pytest
from torch import nn
from transformers import AutoModelForCausalLM

from normkit.demo.architecture import build
from normkit.errors import InputError
from normkit.layers import LayerNorm, RMSNorm


@pytest.mark.parametrize(("name", "kind"), [("layernorm", LayerNorm), ("rmsnorm", RMSNorm)])
def test_every_norm_is_ours_and_the_parameters_are_stock(name, kind):
    model = build(name)
    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    assert [type(norm) for norm in norms] == [kind] * 13
    assert {norm.eps for norm in norms} == {1e-5}
    stock = AutoModelForCausalLM.from_config(model.config)
    assert {key: value.shape for key, value in model.state_dict().items()} == {
        key: value.shape for key, value in stock.state_dict().items()
    }


def test_the_twins_are_of_one_size():
    sizes = [sum(parameter.numel() for parameter in build(name).parameters()) for name in ("layernorm", "rmsnorm")]
    assert max(sizes) / min(sizes) < 1.01


def test_nothing_drops_out():
    assert {module.p for module in build("layernorm").modules() if isinstance(module, nn.Dropout)} == {0.0}


def test_an_unknown_architecture_is_refused():
    with pytest.raises(InputError, match="got 'batchnorm'"):
        build("batchnorm")
