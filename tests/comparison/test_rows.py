"""Where two runs begin to differ, how that grows, and what explains it: faults are planted one at a time."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from normkit.comparison.comparing import compare
from normkit.comparison.own_rounding import OwnRounding, own_rounding
from normkit.comparison.recording import Recording
from normkit.comparison.rows import Rows, compare_rows
from normkit.comparison.torch_recorder import recorded
from planted_ports import FAULTS, port_of

IDS = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(1))


def model_of(kind: str, dtype: torch.dtype) -> nn.Module:
    """Two or three blocks with gains of many sizes."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "rms_norm_eps": 1e-6}
    model: nn.Module
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    else:
        kinds = ["sliding_attention", "full_attention"]
        own = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16, "layer_types": kinds}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, **own))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype).eval()


class Reference:
    """A model, its recording, whose norms are identified once, and its own rounding."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        self.model = model_of(kind, dtype)
        self.recording: Recording = recorded(self.model, IDS)
        self.own: OwnRounding = own_rounding(self.model, IDS, self.recording)

    @functools.cache  # noqa: B019
    def against(self, fault: str, dtype: torch.dtype | None = None) -> Rows:
        """The result for a port with a fault, which several tests look at."""
        port = port_of(self.model, fault)
        return compare_rows(recorded(port if dtype is None else port.to(dtype), IDS), self.recording, self.own)


@pytest.fixture(scope="module", params=["gemma", "llama"])
def exact(request: pytest.FixtureRequest) -> Reference:
    return Reference(request.param, torch.float32)


@pytest.fixture(scope="module", params=["gemma", "llama"])
def rounded(request: pytest.FixtureRequest) -> Reference:
    return Reference(request.param, torch.bfloat16)


def kinds(found: Rows) -> set[str]:
    return {cause.kind for cause in found.causes}


def is_gemma(reference: Reference) -> bool:
    return "Gemma" in type(reference.model).__name__


@pytest.mark.sampled(1)
@pytest.mark.slow
def test_a_right_port_with_other_names_is_no_more_different_than_rounding(exact: Reference) -> None:
    found = exact.against("")
    assert (found.birth, found.causes, found.at_norms) == (None, (), ())
    assert found.verdict == "no more different than rounding explains"
    assert {how for _, _, how in found.pairs} == {"order"}
    assert found.steps[-1].where == "after"
    assert found.steps[-1].units < 8


@pytest.mark.sampled(1)
@pytest.mark.slow
def test_the_output_of_a_norm_whose_gain_is_folded_differs_by_design(exact: Reference) -> None:
    port = port_of(exact.model, "")
    layer = port.stack[1]
    with torch.no_grad():
        gain = layer.a.g + layer.a.offset
        for weight in (layer.q, layer.k, layer.v):
            weight.mul_(gain)
        layer.a.g.fill_(1 - layer.a.offset)
    rows = recorded(port, IDS)
    # What reads a norm in code of one's own nobody declares, and the rows behind it show it.
    whole = compare(port, exact.model, IDS)
    assert (whole.verdict, whole.rows.birth) == ("the same", None)
    assert {each.relation.kind for each in whole.values.tensors if each.path == "stack.1.a"} == {"folded"}
    lost = port_of(exact.model, "")
    lost.stack[1].a.g.data.fill_(1 - layer.a.offset)
    assert compare(lost, exact.model, IDS).verdict == "different"
    found = compare_rows(rows, exact.recording, exact.own, folded=["stack.1.a"])
    assert (found.birth, found.causes, found.at_norms) == (None, (), ())
    unfolded = compare_rows(rows, exact.recording, exact.own)
    assert unfolded.birth is not None
    assert (unfolded.birth.where, unfolded.birth.path) == ("at", "stack.1.a")


@pytest.mark.slow
def test_a_model_against_itself_is_the_same_to_the_bit(exact: Reference) -> None:
    found = compare_rows(exact.recording, exact.recording, exact.own)
    assert (found.verdict, found.first_bits, found.largest) == ("the same to the bit", None, 0.0)


class Queries(nn.Module):
    """A map and the norm of its rows, with a rotary embedding between or behind them."""

    def __init__(self, *, turns_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.map, self.q_norm, self.turns_first = nn.Linear(8, 16), nn.RMSNorm(16, eps=1e-6), turns_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(x))[:, None] * 10.0 ** -torch.linspace(0, 2, 8)

        def turned(rows: torch.Tensor) -> torch.Tensor:
            first, second = rows.split(8, 1)
            parts = [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
            return torch.cat(parts, 1)

        return self.q_norm(turned(self.map(x))) if self.turns_first else turned(self.q_norm(self.map(x)))


def test_a_norm_of_queries_behind_the_rotary_embedding_is_named_so() -> None:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    port, reference = (recorded(Queries(turns_first=first), x) for first in (True, False))
    (cause,) = compare_rows(port, reference).causes
    assert (cause.kind, cause.paths) == ("rotation", ("q_norm",))
    # What is allowed at the first difference is what had grown until there, not that difference itself.
    other = Queries(turns_first=False)
    other.map.weight.data.normal_()
    assert compare_rows(recorded(other, x), reference).causes == ()


# Fault -> where it is born in a Llama, and in a Gemma; and what the causes say.
BORN = {
    "rope base": (("before", "stack.1.m", "attention"), ("before", "stack.1.a2", "attention"), "first token"),
    "softmax scale": (("before", "stack.1.m", "attention"), ("before", "stack.1.a2", "attention"), "first token"),
    "swapped gains": (("at", "stack.1.a", ""), ("at", "stack.1.a", ""), "swapped gains"),
    "missing norm": (("before", "last", "MLP"), ("before", "stack.1.m2", "MLP"), "missing norm"),
    "eps": (("at", "stack.1.a", ""), ("at", "stack.1.a", ""), "formula"),
    "embedding scale": (("before", "stack.0.a", "embedding"), ("before", "stack.0.a", "embedding"), "scale"),
    "gelu": (("before", "last", "MLP"), ("before", "stack.1.m2", "MLP"), ""),
    "residual order": (("before", "last", "MLP"), ("before", "last", "residual sum"), "wiring"),
    "final norm": (("after", None, "head"), ("after", None, "head"), "final norm"),
    "applied twice": (("before", "stack.1.m", "attention"), ("before", "stack.1.qn", "attention"), "applied twice"),
    "softcap": (("after", None, "head"), ("after", None, "head"), "softcap"),
    "logit scale": (("after", None, "head"), ("after", None, "head"), "scale"),
    "mask": (("before", "stack.1.m", "attention"), ("before", "stack.1.a2", "attention"), ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", BORN)
def test_each_fault_is_born_where_it_was_planted(exact: Reference, fault: str) -> None:
    found = exact.against(fault)
    *born, cause = BORN[fault]
    assert found.birth is not None
    assert (found.birth.where, found.birth.path, found.birth.block) == born[is_gemma(exact)]
    assert found.verdict == "different"
    assert kinds(found) == ({cause} if cause else set())


# Faults that bfloat16 hides in so small a model: as different as the reference is from itself.
HIDDEN = {"rope base": "Llama", "gelu": "Gemma", "eps": "", "softcap": "", "cast order": ""}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in BORN if fault not in HIDDEN])
def test_most_show_in_bfloat16_too(rounded: Reference, fault: str) -> None:
    found = rounded.against(fault)
    *born, cause = BORN[fault]
    assert found.birth is not None
    assert (found.birth.where, found.birth.path) == born[is_gemma(rounded)][:2]
    assert kinds(found) >= ({cause} if cause else set())


@pytest.mark.slow
def test_a_right_port_in_bfloat16_is_as_different_as_the_reference_from_itself(rounded: Reference) -> None:
    found = rounded.against("")
    assert found.verdict == "as different as the reference in bfloat16 is from itself in float32"
    assert (found.birth, found.causes) == (None, ())


@pytest.mark.slow
def test_a_bfloat16_port_of_a_float32_reference_is_no_fault(exact: Reference) -> None:
    found = exact.against("", torch.bfloat16)
    assert found.verdict == "as different as the reference in bfloat16 is from itself in float32"
    assert (found.birth, found.causes) == (None, ())
    assert exact.against("softmax scale", torch.bfloat16).birth is not None


@pytest.mark.slow
def test_another_cast_order_is_named_with_its_norms(rounded: Reference) -> None:
    found = rounded.against("cast order")
    (cause,) = found.causes
    assert (cause.kind, found.birth) == ("casts", None)
    norms = ["a", "qn", "kn", "a2", "m", "m2"] if is_gemma(rounded) else ["a", "m"]
    assert cause.paths == tuple(f"stack.1.{name}" for name in norms)
    assert "rounded before the gain" in cause.words
    count = len(norms)
    assert found.verdict.startswith(f"within rounding, but {count} norms of the port have other bits (stack.1.a, ")


@pytest.mark.sampled(1)
@pytest.mark.slow
def test_another_eps_shows_in_the_bits_of_bfloat16(rounded: Reference) -> None:
    found = rounded.against("eps")
    assert kinds(found) == {"formula"}
    assert any("are the reference's with eps 0.001" in cause.words for cause in found.causes)


@pytest.mark.slow
def test_an_eps_and_an_offset_are_named(exact: Reference) -> None:
    found = exact.against("eps")
    assert kinds(found) == {"formula"}
    # Where the reference's rows do not feel its eps, its place is open.
    assert all("follow the reference's formula with eps 0.001" in cause.words for cause in found.causes)
    assert any(cause.words.endswith("eps 0.001 instead of 1e-06") for cause in found.causes)
    if is_gemma(exact):
        (cause,) = exact.against("offset").causes
        assert "with weight instead of 1 + weight" in cause.words


@pytest.mark.sampled(1)
@pytest.mark.slow
def test_words_of_the_wiring(exact: Reference) -> None:
    behind = "model.layers.1." + ("pre_feedforward_layernorm" if is_gemma(exact) else "post_attention_layernorm")
    said = {fault: exact.against(fault).causes[0].words for fault in BORN if BORN[fault][2]}
    assert said["swapped gains"] == "the gains of stack.1.a and stack.1.m are swapped"
    assert said["final norm"] == (
        "the final norm is not applied: the head takes what enters model.norm in the reference"
    )
    assert said["applied twice"] == "stack.1.a is applied twice: what leaves it enters it again"
    assert said["residual order"] == (
        f"the residual connection around {behind} adds what the norm gives, not what enters it, "
        "as what enters last shows"
    )
    assert said["missing norm"].endswith(f"where the reference has {behind}")
    assert "a factor sqrt(64)" in said["embedding scale"]
    assert "30 * tanh(x / 30)" in said["softcap"]
    assert said["logit scale"] == "the port's outputs are 0.5 times the reference's"


@pytest.mark.slow
def test_without_the_own_rounding_the_rounding_of_the_dtype_counts(exact: Reference) -> None:
    port = recorded(port_of(exact.model, "rope base"), IDS)
    found = compare_rows(port, exact.recording)
    assert found.birth is not None
    assert found.birth.block == "attention"
    # What differs before the outputs says nothing of their rounding.
    assert found.outputs_agree is None
    right = compare_rows(recorded(port_of(exact.model, ""), IDS), exact.recording)
    assert (right.birth, right.verdict) == (None, "no more different than rounding explains")
    assert right.outputs_agree


@pytest.mark.sampled(1)
@pytest.mark.slow
def test_recordings_in_files_are_compared_alike(rounded: Reference, tmp_path) -> None:
    port = recorded(port_of(rounded.model, "swapped gains"), IDS)
    files = [
        each.write(tmp_path / name) for each, name in ((port, "a.safetensors"), (rounded.recording, "b.safetensors"))
    ]
    found = compare_rows(*map(Recording.read, files))
    assert found.birth is not None
    assert (found.birth.path, kinds(found)) == ("stack.1.a", {"swapped gains"})


def test_every_fault_is_tried() -> None:
    assert {*FAULTS} == {*BORN, "cast order", "offset"}


@pytest.mark.parametrize(
    ("given", "expected", "told"),
    [
        (((1, 2, 3),), ((1, 2, 4),), "token 3 is 3 in the port and 4 in the reference"),
        (((5, 6, 7, 8),), ((2, 5, 6, 7, 8),), "the reference begins with token 2, the other does not"),
    ],
)
def test_rows_of_other_tokens_are_not_compared(given, expected, told) -> None:
    found = compare_rows(Recording(norms={}, tokens=given), Recording(norms={}, tokens=expected))
    assert found.not_run == f"the rows are of other tokens: {told}; record both on the same ids"
    assert found.verdict == "not compared row by row"
