"""Group B on a small DiT: scale and shift that a condition gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from helpers import finding_of

WIDTH = 32


class Block(nn.Module):
    """Adaptive norm, MLP and gate; `one` is what is added to the scale."""

    def __init__(self, one: float) -> None:
        super().__init__()
        self.one = one
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 3 * WIDTH))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift, gate = self.modulation(condition)[:, None].chunk(3, -1)
        return x + gate * self.mlp(self.norm(x) * (self.one + scale) + shift)


class Dit(nn.Module):
    def __init__(self, *ones: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.embedding = nn.Linear(4, WIDTH), nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(map(Block, ones))
        self.norm, self.down = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        x, condition = self.up(x), self.embedding(timestep)
        for block in self.blocks:
            x = block(x, condition)
        return self.down(self.norm(x))


def inspected(model: nn.Module, timesteps: Tensor | None = None) -> nk.Inspection:
    x = torch.randn(6, 16, 4, generator=torch.Generator().manual_seed(0))
    return nk.inspect(model.eval(), {"x": x, "timestep": torch.arange(6) if timesteps is None else timesteps})


def test_a_dit_is_clean_and_its_factors_are_measured():
    model = Dit(1.0, 1.0, 1.0)
    found = inspected(model)
    assert [each.rule for each in found.findings if each.severity != "note"] == []
    # The last norm has no condition.
    assert [each.path for each in found.modulations] == [*(f"blocks.{index}.norm" for index in range(3)), "norm"]
    first = found.modulations[0]
    scale, shift, _ = model.blocks[0].modulation(model.embedding(torch.arange(6))).detach().double().chunk(3, -1)
    # Fitted to float32 products.
    assert first.centre == pytest.approx(1 + float(scale.mean()), rel=1e-4)
    assert first.varied == pytest.approx(float((scale - scale.mean(0)).square().mean().sqrt()), rel=1e-3)
    # Of an output with deviation 1 along the features, a channel has less along the tokens.
    in_outputs = float((shift - shift.mean(0)).square().mean().sqrt())
    assert in_outputs < first.shift_varied < 1.5 * in_outputs


@pytest.mark.parametrize(("one", "words"), [(0.0, "the 1 is missing"), (2.0, "one 1 is too many")])
def test_a_factor_that_is_not_around_1(one, words):
    found = finding_of(inspected(Dit(1.0, one, 1.0)), "B16")
    assert (found.severity, found.sites) == ("error", ("blocks.1.norm",))
    assert found.evidence[0].endswith(words)
    # All alike may be meant.
    found = finding_of(inspected(Dit(one, one)), "B16")
    assert (found.severity, len(found.sites)) == ("warning", 2)


def test_a_norm_that_no_condition_changes():
    model = Dit(1.0, 1.0, 1.0)
    with torch.no_grad():
        model.blocks[1].modulation[1].weight.zero_()
    found = finding_of(inspected(model), "B17")
    assert (found.severity, found.sites) == ("warning", ("blocks.1.norm",))
    with torch.no_grad():
        for block in model.blocks:
            block.modulation[1].weight.zero_()
    # adaLN-Zero starts so.
    found = finding_of(inspected(model), "B17")
    assert (found.severity, len(found.sites)) == ("note", 4)
    # The same timestep for all samples tells nothing.
    found = inspected(model, torch.zeros(6, dtype=torch.long))
    assert {check.rule: check.status for check in found.checks if check.rule in ("B16", "B17")} == dict.fromkeys(
        ("B16", "B17"), "not checked"
    )


def watched(model: nn.Module, *left_out: str, fixed: bool = False, steps: int = 13) -> nk.Inspection:
    """Train with AdamW, without some parameters; with `fixed`, on a condition that the embedding gives to all."""
    held = [each for name, each in model.named_parameters() if not any(part in name for part in left_out)]
    optimizer = torch.optim.AdamW(held, lr=3e-2)
    with nk.watch(model, optimizer, every=4, say=lambda _: None) as run:
        for step in range(steps):
            x, timestep = torch.randn(6, 16, 4, generator=torch.Generator().manual_seed(step)), torch.arange(6)
            if fixed and step > 4:
                model.embedding.weight.data.copy_(model.embedding.weight.data[:1].expand(8, -1).clone())
            optimizer.zero_grad()
            loss = (model(x, timestep) - x * timestep[:, None, None]).square().mean()
            loss.backward()
            run.step(loss)
            optimizer.step()
        return run.inspection()


def zeroed() -> Dit:
    model = Dit(1.0, 1.0)
    for block in model.blocks:
        nn.init.zeros_(block.modulation[1].weight)
        nn.init.zeros_(block.modulation[1].bias)
    return model


@pytest.mark.slow
def test_a_run_whose_modulations_stay_where_they_started():
    healthy = watched(zeroed())
    assert finding_of(healthy, "B17") is finding_of(healthy, "B16") is finding_of(healthy, "F4") is None
    assert [each.varied > 0.001 for each in healthy.modulations] == [True, True, False]
    # One measured step: gates at 0 are meant.
    assert finding_of(watched(zeroed(), steps=1), "B17") is None
    found = finding_of(watched(zeroed(), "modulation"), "B17")
    assert (found.severity, found.sites) == ("error", ("blocks.0.norm", "blocks.1.norm", "norm"))
    assert "blocks.0.modulation.1.weight, blocks.1.modulation.1.weight are 0" in found.evidence[0]
    collapsed = finding_of(watched(zeroed(), fixed=True), "B17")
    assert (collapsed.severity, collapsed.sites) == ("warning", ("blocks.0.norm", "blocks.1.norm"))
    lost = watched(Dit(0.0, 1.0, 1.0), steps=5)
    assert finding_of(lost, "B16").sites == ("blocks.0.norm",)
