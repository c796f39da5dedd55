import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from normkit import demo
from normkit.demo.architecture import build, byte_tokenizer
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


def test_the_twins_are_of_one_size_nothing_drops_out_and_no_other_is_built():
    sizes = [sum(parameter.numel() for parameter in build(name).parameters()) for name in ("layernorm", "rmsnorm")]
    assert max(sizes) / min(sizes) < 1.01
    assert {module.p for module in build("layernorm").modules() if isinstance(module, nn.Dropout)} == {0.0}
    with pytest.raises(InputError, match="got 'batchnorm'"):
        build("batchnorm")


@pytest.fixture(scope="module", params=["fresh", "layernorm", "rmsnorm"])
def tokenizer(request):
    if request.param == "fresh":
        return byte_tokenizer(256)
    return AutoTokenizer.from_pretrained(demo.directory(request.param))


@pytest.mark.slow
@given(text=st.text(max_size=40))
def test_the_ids_are_the_bytes_and_any_text_round_trips(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_awkward_texts_round_trip_and_none_of_256_tokens_is_special(tokenizer):
    for text in ["", " a", "a ,b .", "\0", "Ā", "é\n\t\r ", "漢字 😀", "<|endoftext|>", "</s>", " n't 's"]:
        assert tokenizer(text)["input_ids"] == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    assert len(tokenizer) == 256
    assert tokenizer.all_special_tokens == []
    assert tokenizer.model_max_length == 256
