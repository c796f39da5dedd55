import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from normkit import demo
from normkit.demo.tokenizer import byte_tokenizer


@pytest.fixture(scope="module", params=["fresh", "layernorm", "rmsnorm"])
def tokenizer(request):
    if request.param == "fresh":
        return byte_tokenizer(256)
    return AutoTokenizer.from_pretrained(demo.directory(request.param))


@pytest.mark.slow
@given(text=st.text(max_size=300))
def test_the_ids_are_the_bytes_and_any_text_round_trips(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_awkward_texts_round_trip(tokenizer):
    for text in ["", " a", "a ,b .", "\0", "Ā", "é\n\t\r ", "漢字 😀", "<|endoftext|>", "</s>", " n't 's"]:
        assert tokenizer(text)["input_ids"] == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text


def test_there_are_256_tokens_none_special(tokenizer):
    assert len(tokenizer) == 256
    assert tokenizer.all_special_tokens == []
    assert tokenizer.model_max_length == 256
