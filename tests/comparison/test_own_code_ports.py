"""Ports in code of their own, with norms that no usual one is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normkit.comparison.comparing import compare
from normkit.comparison.recording import RecordedNorm, Recording
from normkit.comparison.report import describe_comparison

pytestmark = pytest.mark.slow

LAYERS, WIDTH, TOKENS = 3, 64, 50


class Scaled(nn.Module):
    """RMSNorm over an axis, or a division by the mean of the magnitudes."""

    def __init__(self, gain: Tensor, way: str) -> None:
        super().__init__()
        self.weight, self.way = nn.Parameter(gain.clone()), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "magnitudes":
            return x / (x.abs().mean(-1, keepdim=True) + 1e-6) * self.weight
        axis = 1 if self.way == "positions" else -1
        return x * torch.rsqrt(x.square().mean(axis, keepdim=True) + 1e-6) * self.weight


class Stack(nn.Module):
    """A stream of residual layers; `way` is that of the norms of the layers, `name` what they are called."""

    def __init__(self, way: str = "", name: str = "norm") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        gains = 0.5 + torch.rand(LAYERS + 1, WIDTH, generator=generator)
        maps = torch.randn(LAYERS + 1, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.tokens.weight.data = torch.randn(TOKENS, WIDTH, generator=generator)
        self.norms = nn.ModuleDict({f"{name}{layer}": Scaled(gains[layer], way) for layer in range(LAYERS)})
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS + 1))
        for linear, weight in zip(self.maps, maps, strict=True):
            linear.weight.data = weight.clone()
        self.final = Scaled(gains[-1], "")

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for norm, linear in zip(self.norms.values(), self.maps, strict=False):
            x = x + linear(norm(x))
        return self.maps[-1](self.final(x))


@pytest.fixture
def ids() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(TOKENS, (2, 24), generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("name", ["norm", "other"])
def test_statistics_over_the_positions_are_named(name: str, ids: dict[str, Tensor]) -> None:
    found = compare(Stack("positions", name), Stack(), ids)
    assert {pair.entry.path for pair in found.conventions.changed} == {f"norms.{name}{at}" for at in range(LAYERS)}
    assert found.causes[0].sentence.startswith("3 of 4 norms do not compute what the reference's do: a row is ")
    assert found.rows.birth is not None
    assert (found.rows.birth.where, found.rows.birth.path) == ("at", f"norms.{name}0")


def test_a_reference_over_the_positions_is_compared_too(ids: dict[str, Tensor]) -> None:
    found = compare(Stack(), Stack("positions"), ids)
    assert [pair.entry.path for pair in found.conventions.changed if pair.observed] != []
    assert found.rows.birth is not None
    assert found.rows.birth.path == "norms.norm0"


@pytest.mark.parametrize("name", ["norm", "other"])
def test_a_division_by_the_mean_magnitude_is_named_and_not_missing(name: str, ids: dict[str, Tensor]) -> None:
    found = compare(Stack("magnitudes", name), Stack(), ids)
    (cause,) = found.causes
    assert cause.places == tuple(f"norms.{name}{layer}" for layer in range(LAYERS))
    assert cause.sentence.endswith(
        " do not compute what the reference's do: no norm of the space of conventions (its rows are divided by the "
        "mean of their magnitudes)."
    )
    fact = next(each for each in describe_comparison(found).facts if each.label == "no convention")
    assert "no division by a standard deviation or rms explains its rows" in fact.value


def test_a_reference_that_no_spec_describes_is_told_with_its_norm_of_the_port(ids: dict[str, Tensor]) -> None:
    (cause,) = compare(Stack(name="other"), Stack("magnitudes"), ids).causes
    assert cause.places == tuple(f"norms.other{layer}" for layer in range(LAYERS))
    assert "which is none of the conventions (it does not grow with its input" in cause.sentence


def test_a_norm_that_is_lacking_is_still_missing(ids: dict[str, Tensor]) -> None:
    port = Stack()
    port.norms["norm1"] = nn.Identity()
    found = compare(port, Stack(), ids)
    assert any("norms.norm1" in cause.sentence and "missing" in cause.sentence for cause in found.causes)


def test_what_the_bits_alone_show_is_a_difference() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(400, 128, generator=generator).bfloat16()
    gain = (0.5 + torch.rand(128, generator=generator)).bfloat16()
    normalized = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    early, late = normalized.bfloat16() * gain, (normalized * gain.float()).bfloat16()
    port, reference = (
        Recording(norms={"norm": RecordedNorm(input=x, output=y, weight=gain)}, name=name)
        for name, y in (("port", late), ("reference", early))
    )
    found = compare(port, reference)
    assert found.rows.birth is None
    assert [cause.level for cause in found.causes] == ["rows"]
    verdict = describe_comparison(found).verdict
    assert verdict is not None
    assert (verdict.headline, found.differs) == ("different", True)
    assert not compare(reference, reference).differs


class Drafting(Stack):
    """A second head beside the model's own, whose logits are added to its own or stand beside them."""

    def __init__(self, *, is_late: bool, together: str) -> None:
        super().__init__()
        self.head, self.draft = (nn.Linear(WIDTH, TOKENS, bias=False) for _ in range(2))
        self.narrow = nn.Linear(WIDTH, WIDTH, bias=False)
        generator = torch.Generator().manual_seed(8)
        for linear in (self.head, self.draft, self.narrow):
            linear.weight.data = torch.randn(linear.weight.shape, generator=generator) / WIDTH**0.5
        self.is_late, self.together = is_late, together

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for norm, linear in zip(self.norms.values(), self.maps, strict=False):
            x = x + linear(norm(x))
        y = self.final(x)
        drafted, logits = y if self.is_late else x, self.head(y)
        if self.together == "behind a map":
            drafted = torch.tanh(self.narrow(drafted))
        drafted = self.draft(drafted)
        return logits + drafted if self.together == "sum" else torch.cat([logits, drafted], -1)


@pytest.mark.parametrize("together", ["sum", "cat", "behind a map"])
def test_a_second_head_that_reads_the_stream_before_the_final_norm_is_named(
    together: str, ids: dict[str, Tensor]
) -> None:
    reference = Drafting(is_late=True, together=together)
    found = compare(Drafting(is_late=False, together=together), reference, ids)
    head = "narrow" if together == "behind a map" else "draft"
    assert [cause.sentence for cause in found.causes] == [
        f"The head {head} takes what enters final, where the reference's {head} takes what leaves final."
    ]
    assert found.wiring is not None
    assert found.wiring.causes == found.causes
    assert not compare(Drafting(is_late=True, together=together), reference, ids).differs
