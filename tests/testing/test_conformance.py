"""Good norms pass, every fault of the catalogue is caught and named, and nothing is changed."""

from __future__ import annotations

import copy
import inspect
import os
import subprocess
import sys
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normkit as nk
from faulty_norms import FAULTS, EpsAsClamp, Gain, GainAndBias, LlamaWithEps, OffsetMissed
from helpers import PRESETS
from normkit import NormSpec, specs
from normkit.errors import InputError, KindError, ShapeError
from normkit.testing import ConformanceError, assert_conforms, violations
from normkit.testing.violation import CHECKS

pytestmark = pytest.mark.slow

N = 64
# PyTorch's own sums in 16 bits stop growing: see the test below.
IN_TORCH = ("gain gradient", "bias gradient")


def names(found):
    return tuple(violation.check for violation in found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_fault_is_named_once_and_its_cause_first(fault):
    with pytest.raises(ConformanceError, match=f"  {fault.checks[0]}: expected ") as raised:
        assert_conforms(fault.build(), fault.meant)
    assert names(raised.value.violations) == fault.checks


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "fault",
    [*FAULTS[:3], *(pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS[3:])],
    ids=lambda fault: fault.id,
)
def test_left_out_by_name_nothing_of_a_fault_is_left(fault):
    assert_conforms(fault.build(), fault.meant, skip=fault.checks)


def test_what_is_raised_is_what_is_listed():
    fault = FAULTS[0]
    with pytest.raises(ConformanceError) as raised:
        assert_conforms(fault.build(), fault.meant)
    assert raised.value.violations == violations(fault.build(), fault.meant) != ()


# Each kind of axes, centring, eps, cast, gain and output that a preset has.
QUICK = ("TORCH_LAYER_NORM", "TORCH_RMS_NORM", "LLAMA", "GEMMA", "T5", "DEBERTA", "CONVNEXT", "POOLFORMER")
QUICK += ("SCALE_NORM",)
CHANNELS_LAST_NORM = NormSpec(axes="all_but_batch_channels_last", groups=4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in PRESETS if name not in QUICK)]
)
def test_every_preset_conforms_to_itself(name):
    spec = PRESETS[name]
    assert_conforms_to_itself(spec)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "spec", [specs.LLAMA.replace(output_dtype="float32"), NormSpec(cast="input"), CHANNELS_LAST_NORM], ids=str
)
def test_conventions_that_no_preset_has_conform_to_themselves(spec):
    assert_conforms_to_itself(spec)


def assert_conforms_to_itself(spec):
    shape = (2, 16, 4, 3) if spec.axes in ((1,), "all_but_batch") else (2, 3, 48)
    features = shape[1] if len(shape) == 4 else shape[-1]
    assert_conforms(nk.Norm(spec, features), spec, shape)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("llama.LlamaRMSNorm", specs.LLAMA),
        ("gemma.GemmaRMSNorm", specs.GEMMA),
        ("t5.T5LayerNorm", specs.T5),
        ("olmo2.Olmo2RMSNorm", specs.OLMO2),
        ("cohere.CohereLayerNorm", specs.COHERE),
        pytest.param("deberta.DebertaLayerNorm", specs.DEBERTA.replace(eps=1e-12), marks=pytest.mark.slow),
        pytest.param("imagegpt.ImageGPTLayerNorm", specs.IMAGEGPT, marks=pytest.mark.slow),
        pytest.param("muse_spark.MuseSparkTextCenteredRMSNorm", specs.MUSE_SPARK, marks=pytest.mark.slow),
        ("muse_spark.MuseSparkTextInputScaledRMSNorm", specs.MUSE_SPARK_INPUT_SCALED),
    ],
)
@pytest.mark.parametrize("n", [32, pytest.param(768, marks=pytest.mark.slow)])
def test_stock_classes_of_transformers_conform(path, spec, n):
    family, name = path.split(".")
    stock = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)
    assert_conforms(stock(n), spec)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("norm", "spec", "shape"),
    [
        (nn.LayerNorm(N), specs.TORCH_LAYER_NORM, None),
        (nn.LayerNorm(N, eps=1e-12), specs.BERT, (8, N)),
        (nn.LayerNorm((4, 16)), specs.TORCH_LAYER_NORM.replace(axes=(-2, -1)), None),
        (nn.LayerNorm(N, elementwise_affine=False), specs.OLMO, N),
        (nn.RMSNorm(N), specs.TORCH_RMS_NORM, None),
        (nn.RMSNorm(N, eps=1e-6).train(), specs.OLMO2, (2, 3, 2, N)),
        (nn.GroupNorm(1, 16), specs.POOLFORMER, None),
        (nn.GroupNorm(4, 16), specs.POOLFORMER.replace(groups=4), None),
        (nn.RMSNorm(1024), specs.TORCH_RMS_NORM, None),
        (nk.LayerNorm(4096), specs.TORCH_LAYER_NORM, None),
        (nk.RMSNorm(2), specs.TORCH_RMS_NORM, None),
    ],
)
def test_torchs_norms_conform_but_for_their_sums_in_sixteen_bits(norm, spec, shape):
    assert_conforms(norm, spec, shape, skip=IN_TORCH if type(norm) in (nn.LayerNorm, nn.GroupNorm) else ())


def test_torchs_sums_over_many_rows_are_wrong_and_ours_are_not():
    found = violations(nn.LayerNorm(32), specs.TORCH_LAYER_NORM)
    assert names(found) == IN_TORCH
    assert all("rows in bfloat16" in violation.found for violation in found)
    assert_conforms(nn.LayerNorm(32), specs.TORCH_LAYER_NORM, dtypes=(torch.float32, torch.float64))
    assert_conforms(nk.LayerNorm(32), specs.TORCH_LAYER_NORM)


@pytest.mark.exhaustive
def test_our_layers_conform_without_the_kernels():
    program = (
        "import normkit as nk; from normkit import specs; from normkit.testing import assert_conforms\n"
        "assert_conforms(nk.LayerNorm(32), specs.TORCH_LAYER_NORM)\n"
        "assert_conforms(nk.Norm(specs.GEMMA, 32), specs.GEMMA)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "NORMKIT_CPU": "off"})


def test_functions():
    weight, bias = torch.ones(N), torch.zeros(N)
    plain = specs.OLMO2.replace(eps=1e-5)

    def rms_norm(x, weight):
        wide = x.float()
        return (weight.float() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    assert_conforms(rms_norm, plain, weight=weight)
    assert names(violations(rms_norm, specs.OLMO2, weight=weight)) == ("eps",)
    assert_conforms(
        F.layer_norm,
        specs.TORCH_LAYER_NORM,
        weight=weight,
        bias=bias,
        call=lambda function, x, weight, bias: function(x, (N,), weight, bias),
        skip=IN_TORCH,
    )
    assert_conforms(lambda x: F.normalize(x, dim=-1), specs.L2_NORM, N)
    assert bool((weight == 1).all())
    assert weight.requires_grad is False


def test_a_call_takes_one_tensor_out_of_several_and_gives_what_else_is_wanted():
    class WithResidual(nn.RMSNorm):
        def forward(self, x, residual):
            return super().forward(x + residual), x + residual

    assert_conforms(
        WithResidual(N, eps=1e-6), specs.OLMO2, call=lambda norm, x: norm(x, torch.zeros_like(x))[0], weight="weight"
    )


def test_parameters_of_any_name_are_found_by_what_they_do():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift, self.scale = nn.Parameter(torch.zeros(N)), nn.Parameter(torch.ones(N))

        def forward(self, x):
            return F.layer_norm(x, (N,), self.scale, self.shift)

    assert_conforms(Named(), specs.TORCH_LAYER_NORM, skip=IN_TORCH)
    assert_conforms(Named(), specs.TORCH_LAYER_NORM, skip=IN_TORCH, weight="scale", bias="shift")


def test_what_the_spec_does_not_have_shows():
    assert names(violations(nn.LayerNorm(N), specs.MODERNBERT, skip=IN_TORCH)) == ("bias",)
    assert names(violations(nn.RMSNorm(N), specs.TORCH_RMS_NORM.replace(has_weight=False))) == ("gain",)
    [seen] = violations(nn.LayerNorm(N, elementwise_affine=False), specs.COHERE, N)
    assert (seen.check, seen.expected) == ("gain", "a gain")


def test_two_faults_are_both_named():
    class Both(GainAndBias):
        def forward(self, x):
            wide = x.float()
            centred = wide - wide.mean(-1, keepdim=True)
            # The gradient does not see the scale.
            return self.affine(centred * torch.rsqrt(wide.var(-1, keepdim=True).detach() + self.eps), x)

    assert names(violations(Both(), specs.TORCH_LAYER_NORM)) == ("divisor", "input gradient")


def test_only_in_sixteen_bits():
    assert names(violations(LlamaWithEps(eps=1e-5), specs.LLAMA, dtypes=(torch.bfloat16,))) == ("eps",)
    assert names(violations(OffsetMissed(), specs.GEMMA, dtypes=(torch.float16,))) == ("offset",)
    assert_conforms(LlamaWithEps(), specs.LLAMA, dtypes=(torch.float16,))


def test_a_norm_that_does_not_run_in_a_dtype_or_returns_something_else():
    class OnlyWide(Gain):
        def forward(self, x):
            if x.dtype == torch.float16:
                raise TypeError("no float16 here")
            return (self.weight.float() * self.rms(x)).to(x.dtype)

    [seen] = violations(OnlyWide(), specs.OLMO2)
    assert seen.check == "call"
    assert seen.found == "TypeError: no float16 here"
    assert_conforms(OnlyWide(), specs.OLMO2, dtypes=(torch.float32, torch.bfloat16))
    [seen] = violations(lambda x: (x, x), specs.NANOCHAT, N, dtypes=(torch.float32,))
    assert "a tuple; call=" in seen.found
    [seen] = violations(lambda x: x[..., :2], specs.NANOCHAT, N, dtypes=(torch.float32,))
    assert seen.found.startswith("shape (")


def test_nothing_is_changed():
    module = nn.LayerNorm(N).to(torch.bfloat16)
    module.weight.grad = torch.ones(N, dtype=torch.bfloat16)
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    with torch.no_grad():
        violations(module, specs.COHERE)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert bool((module.weight.grad == 1).all())
    assert module.bias.grad is None
    assert module.training
    assert violations(module, specs.COHERE) == violations(module, specs.COHERE)


def test_the_error_reads_as_one_line_a_violation():
    with pytest.raises(AssertionError) as raised:
        assert_conforms(EpsAsClamp(), specs.OLMO2)
    head, *lines, last = str(raised.value).splitlines()
    assert head == "EpsAsClamp is not y = weight * x / sqrt(mean(x^2) + 1e-06)"
    assert lines[0].startswith("  eps: expected 1e-06 inside the root; found 1e-06 as a lower bound; to confirm: ")
    assert len(lines) == len(raised.value.violations) == 2
    assert last == "  (a check is left out by its name: skip=('eps', 'constant rows',))"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((nn.Identity(), specs.OLMO), {}, ShapeError, "no parameter tells the shape"),
        ((nn.Identity(), specs.OLMO, (4,)), {}, ShapeError, "shape must be"),
        ((nn.LayerNorm(N), "layer norm"), {}, KindError, "spec must be a NormSpec"),
        ((3, specs.OLMO, N), {}, KindError, "a module or a function"),
        ((nn.LayerNorm(N), specs.OLMO), {"skip": ("eps", "epsilon")}, InputError, "skip takes names among call, rows"),
        ((nn.LayerNorm(N), specs.OLMO), {"skip": "eps"}, InputError, "skip takes names"),
        ((nn.LayerNorm(N), specs.OLMO), {"dtypes": (torch.int8,)}, InputError, "dtypes must be some of"),
        ((nn.LayerNorm(N), specs.OLMO), {"dtypes": ()}, InputError, "dtypes must be some of"),
        ((nn.LayerNorm(N), specs.COHERE), {"weight": "scale"}, InputError, "no parameter 'scale'; it has weight, bias"),
        ((nn.LayerNorm(N), specs.COHERE), {"weight": torch.ones(N)}, KindError, "weight must be the name"),
        ((nn.LayerNorm, specs.OLMO, N), {}, KindError, "got the class LayerNorm; make one of it"),
        ((nn.LayerNorm(N), specs.OLMO, float(N)), {}, ShapeError, "shape must be"),
        ((nn.LayerNorm(N), specs.OLMO), {"skip": None}, InputError, "skip takes names"),
        ((nn.LayerNorm(N), specs.OLMO), {"skip": (["eps"],)}, InputError, "skip takes names"),
        ((nn.LayerNorm(N), specs.OLMO), {"dtypes": torch.float32}, InputError, "dtypes must be some of"),
        ((nn.LayerNorm(N), specs.OLMO), {"device": "meta"}, InputError, "device: 'meta' cannot be used"),
        ((nn.LayerNorm(N), specs.OLMO), {"device": "no such"}, InputError, "device: 'no such' cannot be used"),
        ((nn.LayerNorm(N), specs.COHERE.replace(groups=5)), {}, ShapeError, "do not fit into an input of shape"),
        ((nn.Linear(N, N), specs.COHERE, N), {}, ShapeError, "weight of shape .* does not broadcast"),
        ((F.rms_norm, specs.OLMO2), {"weight": torch.ones(N, dtype=torch.int64)}, KindError, "of floating point"),
        ((F.normalize, specs.OLMO2, N), {}, InputError, "a function takes weight= if and only if"),
        ((F.normalize, specs.OLMO2, N), {"weight": "w"}, KindError, "weight must be a tensor"),
        ((F.normalize, specs.OLMO, N), {"bias": torch.ones(N)}, InputError, "has none"),
    ],
)
def test_bad_input(arguments, options, error, words):
    with pytest.raises(error, match=words):
        assert_conforms(*arguments, **options)


def test_the_callers_settings_of_torch_do_not_matter():
    with torch.inference_mode():
        assert_conforms(nn.RMSNorm(N, eps=1e-6), specs.OLMO2)
    norm = nn.RMSNorm(N, eps=1e-6)
    with torch.device("meta"):
        assert_conforms(norm, specs.OLMO2)


def test_both_take_the_same_arguments():
    one, other = inspect.signature(assert_conforms), inspect.signature(violations)
    assert one.parameters == other.parameters


def test_every_check_is_seen_to_fail_here_or_in_its_own_test():
    # Those that no fault of the catalogue fails stand in test_conduct.py, test_derivatives.py and above.
    elsewhere = {"call", "centring", "gain", "bias", "output dtype", "input kept", "layout", "batch position"}
    elsewhere |= {"repeated calls", "modes", "batch invariance"}
    # In test_fused.py.
    elsewhere |= {"residual", "residual dtype", "residual sum"}
    elsewhere |= {"row isolation", "input gradient", "gain gradient", "bias gradient"}
    assert {check for fault in FAULTS for check in fault.checks} | elsewhere == set(CHECKS)
