"""Matrices that one model has apart and the other joined are compared part by part, and none is called missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2Model,
    GPTNeoXConfig,
    GPTNeoXModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from normkit.comparison.report import values_facts
from normkit.comparison.values import Values, compare_values
from normkit.comparison.weights import weights_of

SIZES: dict[str, Any] = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
GROUPED = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0}
QKV = ("q_proj", "k_proj", "v_proj")


def llama() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**GROUPED)).state_dict()


def phi3(apart: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights as Phi-3 has them, of whose model the names and shapes are."""
    made = dict(Phi3ForCausalLM(Phi3Config(**GROUPED)).state_dict())
    for name in made:
        for whole, parts in (("qkv_proj", QKV), ("gate_up_proj", ("gate_proj", "up_proj"))):
            if whole in name:
                made[name] = torch.cat([apart[name.replace(whole, part)] for part in parts])
                break
        else:
            made[name] = apart[name]
    return made


def compared(port: dict[str, Tensor], reference: dict[str, Tensor]) -> Values:
    return compare_values(weights_of(port), weights_of(reference))


def lines(values: Values, label: str) -> list[str]:
    return [fact.value for fact in values_facts(values) if fact.label == label]


def test_a_right_port_says_what_is_joined_and_that_nothing_is_missing() -> None:
    apart = llama()

    found = compared(phi3(apart), apart)

    assert (found.others.missing, found.others.extra, dict(found.others.matrices)) == ((), (), {})
    assert lines(found, "joined") == [
        "q_proj, k_proj and v_proj of the reference are joined in qkv_proj of the port (2 times)",
        "gate_proj and up_proj of the reference are joined in gate_up_proj of the port (2 times)",
    ]
    turned_round = compared(apart, phi3(apart))
    assert (turned_round.others.missing, turned_round.others.extra) == ((), ())
    assert lines(turned_round, "joined")[0] == (
        "q_proj, k_proj and v_proj of the port are joined in qkv_proj of the reference (2 times)"
    )
    assert (
        found.others.paired
        == turned_round.others.paired
        == len([each for each in phi3(apart) if "norm" not in each]) - 4
    )


def test_a_part_that_is_wrong_is_named() -> None:
    apart = llama()
    port = phi3(apart)
    # The rows of k in the first layer.
    port["model.layers.0.self_attn.qkv_proj.weight"][64:96] = torch.randn(32, 64)

    found = compared(port, apart)

    assert dict(found.others.matrices) == {"model.layers.0.self_attn.qkv_proj.weight[k_proj]": "unrelated"}
    found = compared(apart, port)
    assert dict(found.others.matrices) == {"model.layers.0.self_attn.k_proj.weight": "unrelated"}


def test_the_order_of_the_parts_is_that_of_their_values() -> None:
    apart = llama()
    port = phi3(apart)
    for layer in (0, 1):
        path = f"model.layers.{layer}.self_attn"
        port[f"{path}.qkv_proj.weight"] = torch.cat(
            [apart[f"{path}.{each}.weight"] for each in ("v_proj", "q_proj", "k_proj")]
        )

    found = compared(port, apart)

    assert dict(found.others.matrices) == {}
    assert lines(found, "joined")[0].startswith("v_proj, q_proj and k_proj of the reference are joined")


def split(model: dict[str, Tensor], whole: str, turns: int, *, axis: int = 0) -> dict[str, Tensor]:
    """The weights with a joined map in three: q, k and v, of which `turns` pieces each take turns."""
    made = {}
    for name, value in model.items():
        if whole not in name:
            made[name] = value
            continue
        dim = axis if value.dim() == 2 else 0
        pieces = value.movedim(dim, 0).unflatten(0, (turns, 3, -1))
        for place, part in enumerate(QKV):
            made[name.replace(whole, part)] = pieces[:, place].flatten(0, 1).movedim(0, dim).contiguous()
    return made


def test_columns_of_a_conv1d_are_parts_too_and_biases_go_with_them() -> None:
    torch.manual_seed(0)
    joined = GPT2Model(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)).state_dict()
    apart = split(joined, "c_attn", 1, axis=1)

    found = compared(apart, joined)

    assert (found.others.missing, found.others.extra, dict(found.others.matrices)) == ((), (), {})
    assert lines(found, "joined") == [
        "q_proj, k_proj and v_proj of the port are joined in c_attn of the reference (2 times)"
    ]
    # A port of linear maps stores all matrices of its layers the other way round.
    turned = {name: each.T.contiguous() if each.dim() == 2 and "h." in name else each for name, each in apart.items()}
    found = compared(turned, joined)
    assert (found.others.missing, found.others.extra, dict(found.others.matrices)) == ((), (), {})
    assert len(found.others.joined) == 4


def test_parts_that_take_turns_by_heads() -> None:
    torch.manual_seed(0)
    joined = GPTNeoXModel(GPTNeoXConfig(intermediate_size=48, **SIZES)).state_dict()
    apart = split(joined, "query_key_value", 4)

    found = compared(joined, apart)

    assert (found.others.missing, found.others.extra, dict(found.others.matrices)) == ((), (), {})
    assert lines(found, "joined") == [
        "q_proj, k_proj and v_proj of the reference are joined in query_key_value of the port, where they take turns "
        "(4 of each) (2 times)"
    ]
    # As if they stood one behind the other.
    wrong = split(joined, "query_key_value", 1)
    found = compared(wrong, apart)
    assert found.others.missing == ()
    assert found.others.are_wrong


def test_an_order_that_values_do_not_tell_is_not_compared_and_not_missing() -> None:
    apart = llama()
    port = phi3(apart)
    for name in port:
        if "qkv" in name:
            port[name] = port[name][torch.randperm(128)]

    found = compared(port, apart)

    assert (found.others.missing, found.others.extra, dict(found.others.matrices)) == ((), (), {})
    assert lines(found, "joined")[0] == (
        "q_proj, k_proj and v_proj of the reference are joined in qkv_proj of the port; the order in it was not found, "
        "and they are not compared (2 times)"
    )


@pytest.mark.parametrize("bias", [("q_proj", "v_proj"), QKV])
def test_a_part_without_a_bias_leaves_the_others_in_their_places(bias: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    apart = {f"layers.{n}.attn.{part}.weight": torch.randn(32, 32) for n in range(2) for part in QKV}
    joined = {
        f"layers.{n}.attn.in_proj_weight": torch.cat([apart[f"layers.{n}.attn.{part}.weight"] for part in QKV])
        for n in range(2)
    }
    norms = {f"layers.{n}.norm.weight": torch.randn(32) for n in range(2)}
    for n in range(2):
        apart |= {f"layers.{n}.attn.{part}.bias": torch.randn(32) for part in bias}
        held = [apart.get(f"layers.{n}.attn.{part}.bias", torch.zeros(32)) for part in QKV]
        joined[f"layers.{n}.attn.in_proj_bias"] = torch.cat(held)

    found = compared(joined | norms, apart | norms)

    assert (found.others.missing, found.others.extra, dict(found.others.matrices)) == ((), (), {})
    assert lines(found, "joined") == [
        "q_proj, k_proj and v_proj of the reference are joined in in_proj of the port (2 times)"
    ]
    biases = [each for each in found.others.joined if each.whole.endswith("bias")]
    assert [each.starts for each in biases] == [(0, 64) if len(bias) == 2 else (0, 32, 64)] * 2


def test_matrices_that_fit_by_chance_are_not_called_joined() -> None:
    torch.manual_seed(0)
    apart = {f"layers.{n}.{name}.weight": torch.randn(32, 32) for n in range(2) for name in ("one", "two")}
    other = {f"layers.{n}.three.weight": torch.randn(64, 32) for n in range(2)}

    found = compared(other, apart)

    assert found.others.joined == ()
    assert len(found.others.missing) == 4
