"""A swap is verified in its numbers: what differs in any of them is refused, and the reason says in which."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from normkit import specs
from normkit.conversion import verification
from normkit.conversion.replacement import Formula
from normkit.conversion.verification import Setting, settings, verify

LAYER = Formula(specs.TORCH_LAYER_NORM, "weight", "bias", "input")
LLAMA = Formula(specs.LLAMA, "weight", None, "x")
PLAIN = Setting(torch.float32, torch.float32, autocast=False)
BFLOAT16 = Setting(torch.bfloat16, torch.bfloat16, autocast=False)
FLOAT16 = Setting(torch.float16, torch.float16, autocast=False)
N = 48


class Rms(nn.Module):
    """Llama's, with one thing that can be otherwise."""

    def __init__(self, **other) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(N))
        self.other = other

    def forward(self, x):
        other = self.other.get
        if "drop" in self.other and self.training:
            x = nn.functional.dropout(x, 0.5)
        if "overwrites" in self.other:
            x.mul_(1.0)
            x[0] = 0.0
        wide = x if "narrow" in self.other else x.float()
        statistics = wide.detach() if "detached" in self.other else wide
        if "half_gradient" in self.other:
            wide = wide / 2 + wide.detach() / 2
        y = wide * torch.rsqrt(statistics.pow(2).sum(-1, keepdim=True) / (N - other("less", 0)) + other("eps", 1e-6))
        y = self.weight * (y if "late" in self.other else y.to(x.dtype)) + other("bias", 0.0)
        y = y.to(x.dtype) if "late" in self.other else y
        if "wild" in self.other:
            y = y * torch.ones_like(y).flatten().index_fill(0, torch.tensor(7), 2.0).view_as(y)
        return y.detach() if "constant" in self.other else y.float() if "wide" in self.other else y


def problem(module, formula, *wanted):
    checks = verify(module, formula, (2, 3, N), wanted)
    return checks[-1].problem


@pytest.mark.parametrize("setting", [*settings({torch.float32}, {torch.bfloat16}), BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize(("module", "formula"), [(nn.LayerNorm(N), LAYER), (Rms(), LLAMA)], ids=["layer", "rms"])
def test_the_right_formula_passes(module, formula, setting):
    (check,) = verify(module, formula, (2, 3, N), (setting,))
    assert check.problem is None
    assert check.setting == str(setting)
    assert check.elements >= 2**16
    assert [label for label, _, _ in check.gradients] == ["input", "weight", "bias"][: 2 + (formula is LAYER)]
    if check.units is None:
        assert 0.9995 <= check.equal <= 1.0
    else:
        assert check.units <= 4.0


WRONG = {
    "eps": ({"eps": 2e-6}, PLAIN, "u from its formula"),
    "eps, a little": ({"eps": 1.001e-6}, PLAIN, "u from its formula"),
    "unbiased": ({"less": 1}, PLAIN, "u from its formula"),
    "a bias": ({"bias": 1e-4}, PLAIN, "u from its formula"),
    "late cast in bfloat16": ({"late": 1}, BFLOAT16, "% of the outputs are equal, 99.99 % are wanted"),
    "late cast in float16": ({"late": 1}, FLOAT16, "% of the outputs are equal, 99.95 % are wanted"),
    "narrow statistics": ({"narrow": 1}, BFLOAT16, "% of the outputs are equal"),
    "one wild element": ({"wild": 1}, BFLOAT16, "times its roundings"),
    "output dtype": ({"wide": 1}, BFLOAT16, "its output is torch.float32, the formula's torch.bfloat16"),
    "statistics without a gradient": ({"detached": 1}, PLAIN, "its gradient of the input is not that of its formula"),
    "half of the gradient": ({"half_gradient": 1}, PLAIN, "its gradient of the input is not that of its formula"),
    "no gradient at all": ({"constant": 1}, PLAIN, "it has no gradient"),
    "a dropout": ({"drop": 1}, PLAIN, "in training mode it computes something else"),
    "in place": ({"overwrites": 1}, PLAIN, "it changes its input"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_what_differs_is_refused(name):
    other, setting, reason = WRONG[name]
    assert reason in problem(Rms(**other), LLAMA, setting)


@pytest.mark.slow
def test_a_tiny_eps_is_felt():
    formula = LLAMA._replace(spec=specs.LLAMA.replace(eps=1e-12))
    assert problem(Rms(eps=1e-12), formula, PLAIN) is None
    assert "u from its formula" in problem(Rms(eps=1.1e-12), formula, PLAIN)


@pytest.mark.parametrize("name", ["late cast in bfloat16", "late cast in float16", "narrow statistics"])
def test_what_differs_in_16_bits_alone_passes_in_float32(name):
    assert problem(Rms(**WRONG[name][0]), LLAMA, PLAIN) is None


def test_the_first_failure_ends_it():
    checks = verify(Rms(late=1), LLAMA, (2, 3, N), (PLAIN, BFLOAT16, FLOAT16))
    assert [check.problem is None for check in checks] == [True, False]


@pytest.mark.slow
def test_the_gain_is_moved_away_from_one():
    class Squared(Rms):
        def forward(self, x):
            return super().forward(x) * self.weight

    assert "u from its formula" in problem(Squared(), LLAMA, PLAIN)


def test_torchs_wrong_gradients_of_many_rows_are_no_reason_against():
    # torch 2.13 counts 256 rows for each thread where there are more, in bfloat16 on the CPU.
    (check,) = verify(nn.LayerNorm(16), LAYER, (2, 3, 16), (BFLOAT16,))
    assert check.problem is None
    errors = {label: (ours, theirs) for label, ours, theirs in check.gradients}
    assert errors["bias"][0] <= 1.0
    assert errors["bias"][1] > 1.0


def test_a_gradient_that_would_be_worse_is_refused(monkeypatch):
    swap = verification.swap

    def rough(module, formula):
        swap(module, formula)
        forward = type(module).forward
        module.__class__ = type("Rough", (type(module),), {"forward": lambda self, x: forward(self, _Rounded.apply(x))})

    monkeypatch.setattr(verification, "swap", rough)
    assert "the gradient of the input would be off by" in problem(nn.LayerNorm(N), LAYER, PLAIN)


def test_an_output_that_would_be_worse_is_refused(monkeypatch):
    swap = verification.swap

    def rough(module, formula):
        swap(module, formula)
        forward = type(module).forward
        module.__class__ = type("Rough", (type(module),), {"forward": lambda self, x: forward(self, x) * (1 + 1e-6)})

    monkeypatch.setattr(verification, "swap", rough)
    assert "it would be off by" in problem(nn.LayerNorm(N), LAYER, PLAIN)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x

    @staticmethod
    def backward(_ctx, dy):
        return dy.bfloat16().float()


def test_a_setting_that_the_original_refuses_is_left_out():
    class Picky(Rms):
        def forward(self, x):
            if x.dtype == torch.float16:
                raise RuntimeError("no")
            return super().forward(x)

    checks = verify(Picky(), LLAMA, (2, 3, N), (PLAIN, FLOAT16, BFLOAT16))
    assert [check.setting for check in checks] == ["float32", "bfloat16"]


def test_the_module_is_neither_called_nor_changed():
    module = nn.LayerNorm(N)
    module.register_forward_hook(lambda *_: pytest.fail("called"))
    state, generator = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    with torch.inference_mode():
        assert problem(module, LAYER, PLAIN) is None
    assert type(module) is nn.LayerNorm
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert module.training
    assert module.weight.requires_grad
    assert torch.equal(torch.get_rng_state(), generator)


def test_the_settings_are_those_a_norm_may_be_called_in():
    single, half, double = torch.float32, torch.bfloat16, torch.float64
    assert [str(setting) for setting in settings({single}, {single})] == [
        "float32",
        "bfloat16 under autocast",
        "float16 under autocast",
    ]
    assert [str(setting) for setting in settings({half}, {half})] == ["float32", "bfloat16"]
    assert "bfloat16 input, float32 parameters" in [str(setting) for setting in settings({single}, {single, half})]
    assert [str(setting) for setting in settings(set(), {double})] == ["float32", "float64"]
    assert str(settings(set(), set())[0]) == "float32"


@pytest.mark.slow
def test_in_float64_a_lost_machine_epsilon_is_seen():
    double = Setting(torch.float64, torch.float64, autocast=False)
    exact = Formula(specs.TORCH_RMS_NORM, "weight", None, "x")
    assert problem(nn.RMSNorm(N), exact, double) is None

    class Own(nn.RMSNorm):
        pass

    rounded = exact._replace(spec=exact.spec.replace(eps=2.0**-23))
    assert problem(Own(N), rounded, double) is not None
