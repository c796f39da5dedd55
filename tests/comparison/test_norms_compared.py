"""A port held against its reference: planted differences are found, told apart, and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planted_faults as faults
from normkit.comparison.comparing import compare
from normkit.comparison.differences import Comparison
from normkit.comparison.report import describe_comparison
from normkit.errors import InputError

pytestmark = pytest.mark.slow

MIDDLE = "transformer.h.1.ln_2"
NORMS = 7


def changed(found: Comparison) -> list[tuple[str, list[str]]]:
    return [(pair.entry.path, [change.reading for change in pair.changes]) for pair in found.conventions.changed]


def place(found: Comparison) -> tuple[str, str | None, str | None]:
    birth = found.rows.birth
    assert birth is not None
    return birth.where, birth.path, birth.since


def replaced(model: nn.Module, path: str, make: Callable[[Any], nn.Module]) -> nn.Module:
    model.set_submodule(path, make(model.get_submodule(path)))
    return model


class Unbiased(nn.Module):
    """LayerNorm as it is often written by hand: `Tensor.std` divides by n - 1, and eps is outside."""

    def __init__(self, norm: nn.LayerNorm, *, outside: bool = False) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.outside = norm.weight, norm.bias, norm.eps, outside

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        if self.outside:
            return self.weight * centred / (x.std(-1, keepdim=True) + self.eps) + self.bias
        return self.weight * centred / (x.var(-1, keepdim=True) + self.eps).sqrt() + self.bias


class Offset(nn.Module):
    """RMSNorm with a gain of 1 + weight."""

    def __init__(self, norm: Any, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach() - 1.0)
        self.eps, self.offset = norm.variance_epsilon, offset

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (y * (self.offset + self.weight.float())).type_as(x)


def test_a_model_is_its_own_equal(port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]) -> None:
    found = compare(port, stock, batch)
    assert not found.differs
    assert found.conventions.changed == found.conventions.unmatched == ()
    assert (found.rows.compared, found.rows.first_bits, found.rows.not_run) == (NORMS, None, "")
    assert all(pair.observed is None and pair.parameters == () for pair in found.conventions.pairs)


@pytest.fixture(scope="module")
def with_another_eps(twins: dict[str, nn.Module], batch: dict[str, Tensor]) -> Comparison:
    """A port whose norms all have another eps: what each of them changes takes a tenth of a second."""
    return compare(faults.wrong_eps(copy.deepcopy(twins["layernorm"]), 1e-3), twins["layernorm"], batch)


def test_another_eps(with_another_eps: Comparison) -> None:
    found = with_another_eps
    assert found.differs
    assert len(found.conventions.changed) == NORMS
    change = found.conventions.pairs[0].changes[0]
    assert (change.given["eps"], change.expected["eps"]) == (1e-3, 1e-5)
    assert place(found) == ("at", "transformer.h.0.ln_1", None)
    assert found.rows.birth is not None
    assert found.rows.birth.agreed == 0


def test_the_effect_is_that_on_the_rows_that_really_arrive_and_the_largest_comes_first(
    with_another_eps: Comparison, stock: nn.Module, batch: dict[str, Tensor]
) -> None:
    caught = []
    hook = stock.get_submodule("transformer.h.0.ln_1").register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.no_grad():
        stock(**batch)
    hook.remove()
    variance = caught[0].double().var(-1, correction=0).flatten()
    pair = with_another_eps.conventions.pairs[0]
    assert pair.observed is not None
    effect = pair.observed.effects[0]
    # Without bias a row is (v + 1e-5) / (v + 1e-3) as long, squared; the bias only adds to what it is held against.
    shorter = 1 - ((variance + 1e-5) / (variance + 1e-3)).sqrt()
    assert pair.observed.rows == 512
    assert 0.3 * float(shorter.median()) < effect.median < 1.5 * float(shorter.median())
    assert effect.median < effect.worst < 1.5 * float(shorter.max())
    sizes = [pair.observed.worst for pair in with_another_eps.conventions.changed if pair.observed]
    assert len(sizes) == NORMS
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[-1]


def test_an_unbiased_variance_in_one_norm(port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]) -> None:
    found = compare(replaced(port, MIDDLE, Unbiased), stock, batch)
    assert [(path, "divisor" in readings) for path, readings in changed(found)] == [(MIDDLE, True)]
    assert place(found) == ("at", MIDDLE, None)
    observed = found.conventions.changed[0].observed
    assert observed is not None
    # sqrt(64 / 63) - 1, before the bias is added.
    assert observed.effects[0].worst == pytest.approx(0.0079, rel=0.5)


def test_an_offset_that_the_port_missed(twins: dict[str, nn.Module], batch: dict[str, Tensor]) -> None:
    path = "model.layers.1.input_layernorm"
    right = replaced(copy.deepcopy(twins["rmsnorm"]), path, lambda norm: Offset(norm, 1.0))
    missed = replaced(copy.deepcopy(twins["rmsnorm"]), path, lambda norm: Offset(norm, 0.0))
    found = compare(missed, right, batch)
    assert changed(found) == [(path, ["gain"])]
    change = found.conventions.changed[0].changes[0]
    assert (change.given["weight_offset"], change.expected["weight_offset"]) == (0.0, 1.0)
    assert place(found) == ("at", path, None)
    assert found.conventions.changed[0].observed is not None
    assert found.conventions.changed[0].observed.effects[0].median > 0.3


def test_an_offset_that_is_in_the_weights_already_does_nothing_to_the_numbers(
    twins: dict[str, nn.Module], batch: dict[str, Tensor]
) -> None:
    path = "model.layers.1.input_layernorm"
    right = replaced(copy.deepcopy(twins["rmsnorm"]), path, lambda norm: Offset(norm, 1.0))
    found = compare(twins["rmsnorm"], right, batch)
    # Its gain is the same; its casts are others, which no run in float32 feels.
    noted = {pair.entry.path: [cast.reading for cast in pair.casts] for pair in found.conventions.pairs if pair.casts}
    assert (changed(found), noted) == ([], {path: ["casts", "output dtype"]})
    assert found.rows.birth is None
    assert found.values is not None
    [stored] = [each for each in found.values.tensors if each.relation.kind != "equal"]
    assert (stored.path, stored.relation.words, stored.is_right) == (path, "reference + 1", True)
    assert stored.verdict == "the norm adds what it lacks, so the same gain acts"


def test_a_gain_changed_in_the_middle(port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]) -> None:
    weight = port.get_submodule(MIDDLE).weight
    with torch.no_grad():
        weight[7] *= 3
    found = compare(port, stock, batch)
    assert found.conventions.changed == ()
    assert found.differs
    assert place(found) == ("at", MIDDLE, None)
    [pair] = [pair for pair in found.conventions.pairs if pair.parameters]
    right = stock.get_submodule(MIDDLE).weight.detach()
    assert (pair.entry.path, pair.parameters[0].role) == (MIDDLE, "weight")
    assert pair.parameters[0].difference == pytest.approx(2 * float(right[7].abs() / right.abs().max()))
    assert pair.observed is not None


def test_another_weight_between_two_norms(port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]) -> None:
    with torch.no_grad():
        port.get_submodule("transformer.h.1.mlp.c_fc").weight[7] *= 3
    assert place(compare(port, stock, batch)) == ("before", "transformer.h.2.ln_1", MIDDLE)


def test_another_weight_before_the_first_norm(port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]) -> None:
    with torch.no_grad():
        port.get_submodule("transformer.wpe").weight.add_(0.1)
    assert place(compare(port, stock, batch)) == ("before", "transformer.h.0.ln_1", None)


def test_another_weight_after_the_last_norm(port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]) -> None:
    port.lm_head.weight = nn.Parameter(port.lm_head.weight.detach() * 1.1)
    assert place(compare(port, stock, batch)) == ("after", None, "transformer.ln_f")


def test_the_same_formula_computed_otherwise_is_rounding(
    port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]
) -> None:
    class Other(Unbiased):
        def forward(self, x: Tensor) -> Tensor:
            centred = x - x.mean(-1, keepdim=True)
            return self.weight * (centred * (centred.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()) + self.bias

    for path, module in list(port.named_modules()):
        if isinstance(module, nn.LayerNorm):
            replaced(port, path, Other)
    found = compare(port, stock, batch)
    assert found.rows.birth is None
    assert found.rows.first_bits is not None
    assert 0 < found.rows.largest < 1e-4


def test_sixteen_bits_have_their_own_effect(port: Any, batch: dict[str, Tensor]) -> None:
    # The rows of a whole model would be searched norm by norm.
    port.transformer.h, port.config.n_layer = port.transformer.h[:1], 1
    port.bfloat16()
    found = compare(faults.wrong_eps(copy.deepcopy(port)), port, batch)
    observed = found.conventions.changed[0].observed
    assert observed is not None
    assert [effect.dtype for effect in observed.effects] == ["float32", "bfloat16"]


# What cannot be compared.


class Renamed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **batch: Tensor) -> Any:
        return self.inner(**batch)


def test_a_smaller_vocabulary(port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]) -> None:
    port.resize_token_embeddings(100)
    found = compare(faults.wrong_eps(copy.deepcopy(stock)), port, batch)
    highest = int(batch["input_ids"].max())
    assert found.rows.not_run == f"reference embeds 100 tokens, and the text has token {highest}"
    assert len(found.conventions.changed) == NORMS
    assert found.conventions.changed[0].observed is not None


def test_other_widths(stock: nn.Module, batch: dict[str, Tensor]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256, n_positions=128, n_embd=16, n_layer=6, n_head=2, layer_norm_epsilon=1e-6)
    found = compare(stock, GPT2LMHeadModel(config), batch)
    assert found.rows.not_run == "no norm of the one has as many features as a norm of the other"
    assert {tuple(change.reading for change in pair.changes) for pair in found.conventions.pairs} == {
        ("features", "eps")
    }
    assert all(pair.observed is not None and not pair.with_parameters for pair in found.conventions.pairs)


def test_where_nothing_but_the_width_differs_no_effect_is_measured() -> None:
    wide, narrow = (nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width)) for width in (16, 8))
    [pair] = compare(wide, narrow, {"input": torch.randn(2, 4)}).conventions.pairs
    assert [change.reading for change in pair.changes] == ["features"]
    assert pair.observed is None


def test_no_norms_at_all() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), {"input": torch.randn(2, 4)}
    found = compare(model, copy.deepcopy(model), x)
    assert found.conventions.pairs == found.conventions.unmatched == ()
    assert not found.differs
    assert found.not_looked_at["rows"] == "port has no norm"


def test_a_reference_that_fails(port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]) -> None:
    class Short(Renamed):
        def forward(self, **batch: Tensor) -> Any:
            if batch["input_ids"].shape[1] > 16:
                raise RuntimeError("too long\nfor me")
            return super().forward(**batch)

    class Broken(Renamed):
        def forward(self, **_: Tensor) -> Any:
            raise RuntimeError("no")

    found = compare(port, Short(stock), batch)
    assert found.rows.not_run == "Short cannot be run on this input (too long)"
    found = compare(port, Broken(stock), batch)
    reason = "Broken cannot be run on this input (no); give a batch that both models take"
    assert (found.not_looked_at["conventions"], found.not_looked_at["rows"]) == (reason, reason)
    assert found.values is not None
    assert found.values.is_right


class Small(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.norms = nn.ModuleDict({name: nn.LayerNorm(8) for name in names or ("first", "second")})
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, generator=generator)

    def forward(self, idx: Tensor) -> Tensor:
        x: Tensor = self.embedding(idx)
        for norm in self.norms.values():
            x = norm(x.sin())
        return x


class Stock(Small):
    """The same, called as transformers does."""

    def forward(self, input_ids: Tensor, **_: Tensor) -> Tensor:
        return super().forward(input_ids)


IDS = torch.arange(10)[None]


@pytest.mark.parametrize(
    "given", [IDS, (IDS,), [IDS], {"idx": IDS}, {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}], ids=str
)
def test_arguments_may_have_other_names_in_the_port(given: Any) -> None:
    for port, reference in ((Small(), Stock()), (Stock(), Small())):
        found = compare(port, reference, given)
        assert (len(found.conventions.pairs), found.differs, found.rows.not_run) == (2, False, "")


def test_arguments_that_the_port_does_not_take_are_one_line() -> None:
    given = {"input_ids": IDS, "attention_mask": (IDS > 3).long()}
    with pytest.raises(InputError, match=r"Small.forward\(idx\) takes no attention_mask; give batches with"):
        compare(Small(), Stock(), given)


@pytest.mark.parametrize("names", [(), ("a", "b")])
def test_gains_swapped_between_two_norms(names: tuple[str, ...]) -> None:
    port, stock = Small(*names), Small()
    one, other = port.norms.values()
    one.weight, other.weight = other.weight, one.weight
    found = compare(port, stock, IDS)
    first, second = (f"norms.{name}" for name in names or ("first", "second"))
    swapped = [
        (pair.entry.path, change.role, change.swapped_with)
        for pair in found.conventions.pairs
        for change in pair.parameters
    ]
    assert swapped == [(first, "weight", second), (second, "weight", first)]
    assert found.conventions.unmatched == ()
    # With other names, two norms with swapped gains are two norms with swapped biases.
    role, name = ("biases", "bias") if names else ("gains", "weight")
    verdict = describe_comparison(found).verdict
    assert verdict is not None
    assert verdict.detail == f"The {role} of two norms are swapped: {first}.{name} and {second}.{name}."
    one.weight = nn.Parameter(one.weight + 1)
    assert all(
        change.swapped_with is None
        for pair in compare(port, stock, IDS).conventions.pairs
        for change in pair.parameters
    )


def test_no_batch_and_no_such_site(port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]) -> None:
    with pytest.raises(InputError, match="at least one batch"):
        compare(port, stock, [])
    with pytest.raises(InputError, match=r"port has no norm at 'nowhere'"):
        compare(port, stock, batch, site="nowhere")


def test_a_pattern_lists_some_norms_and_looks_at_all(
    port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]
) -> None:
    port.get_submodule("transformer.h.0.ln_1").eps = 1e-3
    found = compare(port, stock, batch, site="transformer.h.*.ln_2")
    assert len(found.conventions.pairs) == 3
    assert place(found) == ("at", "transformer.h.0.ln_1", None)
