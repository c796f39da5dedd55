"""What was found in other runtimes (docs/wild/reports), named by normkit with the right field.

Each find is their formula, written out; the tests that are exhaustive ask their code, where it is installed.
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from torch import nn

import normkit as nk

pytestmark = pytest.mark.slow
THEIRS = pytest.mark.parametrize("theirs", [False, pytest.param(True, marks=pytest.mark.exhaustive)])


def installed(module):
    """A module of a peer, or a skip."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # What a peer raises while it is imported is its own.
        pytest.skip(f"{module}: {error}")


def scaled(x, eps, groups=1):
    """x / sqrt(mean(x^2) + eps), of each group."""
    rows = x.unflatten(-1, (groups, -1))
    return (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)).flatten(-2)


def of_mlx(norm):
    """A norm of MLX as a function of tensors of torch in float32."""
    mx = installed("mlx.core")

    def call(x, weight):
        norm.weight = mx.array(np.asarray(weight))
        return np.array(norm(mx.array(np.asarray(x))))

    return call


@THEIRS
def test_mlx_lm_norms_mamba2_without_its_groups(theirs):
    if theirs:
        call = of_mlx(installed("mlx_lm.models.mamba2").MambaRMSNormGated(64, eps=1e-5))
    else:
        # mlx-lm 0.32.2, mlx_lm/models/mamba2.py:48 to 51.
        def call(x, weight):
            return scaled(x, 1e-5) * weight

    assert nk.identify(call, 64, weight=torch.ones(64)).spec.groups == 1
    # transformers 5.23.0, modeling_mamba2.py:113 to 124.
    reference = nk.identify(lambda x, weight: weight * scaled(x, 1e-5, groups=8), 64, weight=torch.ones(64))
    assert reference.spec.groups == 8


class Gain(nn.Module):
    """A formula of x and its gain as a module; `start` is the gain that is stored for 1."""

    def __init__(self, formula, start=0.0, n=64):
        super().__init__()
        self.weight, self.formula = nn.Parameter(torch.full((n,), start)), formula

    def forward(self, x):
        return self.formula(x, self.weight)


def candle(x, weight):
    """candle 2a13b0f3, models/gemma3.rs:47 to 62 and models/gemma4/text.rs:27 to 42."""
    return scaled(x.float(), 1e-6).to(x.dtype) * (weight + 1.0)


def mlx_gemma(x, weight):
    """mlx-lm 0.32.2, mlx_lm/models/gemma3_text.py:111; mistral.rs 9e922623, layers.rs:515."""
    return (scaled(x.float(), 1e-6) * (1.0 + weight).float()).to(x.dtype)


@THEIRS
def test_candle_adds_1_to_the_whole_gain_of_gemma_4(theirs):
    if theirs:
        gemma4 = installed("transformers.models.gemma4.modeling_gemma4").Gemma4RMSNorm(64)
    else:
        # transformers 5.23.0, modeling_gemma4.py:203 to 221.
        gemma4 = Gain(lambda x, weight: (scaled(x.float(), 1e-6) * weight.float()).to(x.dtype), start=1.0)
    assert nk.identify(gemma4, 64).spec.weight_offset == 0.0
    assert nk.identify(Gain(candle, start=1.0), 64).spec.weight_offset == 1.0


def test_candle_rounds_gemmas_row_before_the_gain():
    spec = nk.identify(Gain(candle), 64).spec
    assert (spec.cast, spec.offset_dtype) == ("early", "parameter")
    assert (nk.specs.GEMMA.cast, nk.specs.GEMMA.offset_dtype) == ("late", "float32")


@THEIRS
def test_mlx_lm_adds_gemmas_1_in_the_dtype_of_the_weight(theirs):
    if not theirs:
        assert nk.identify(Gain(mlx_gemma), 64).spec.offset_dtype == "parameter"
        return
    mx, norm = installed("mlx.core"), installed("mlx_lm.models.gemma3_text").RMSNorm(64, eps=1e-6)
    dtypes = {torch.bfloat16: mx.bfloat16, torch.float16: mx.float16}

    def call(x, weight):
        norm.weight = mx.array(weight.float().numpy()).astype(dtypes.get(weight.dtype, mx.float32))
        y = norm(mx.array(x.float().numpy()).astype(dtypes.get(x.dtype, mx.float32)))
        return torch.from_numpy(np.array(y.astype(mx.float32))).to(x.dtype)

    assert nk.identify(call, 64, weight=torch.zeros(64)).spec.offset_dtype == "parameter"


def test_burn_divides_by_a_rounded_scale():
    # burn 2c06be35, crates/burn-nn/src/modules/norm/rms.rs:71 to 76.
    def burn(x, weight):
        return x / (x.float().square().mean(-1, keepdim=True) + 1e-5).sqrt().to(x.dtype) * weight

    casts = nk.identify(Gain(burn, start=1.0), 64).undecidable["casts"]
    assert casts.startswith("it divides by s rounded to the input's dtype")


def test_ggml_takes_the_variance_in_one_pass_on_gpus():
    def ggml(x, weight):
        # ggml d99724f2, src/ggml-cuda/norm.cu:20 to 37; models multiply by the gain after it.
        mean = x.sum(-1, keepdim=True) / x.shape[-1]
        variance = x.square().sum(-1, keepdim=True) / x.shape[-1] - mean * mean
        return (x - mean) * torch.rsqrt(variance + 1e-5) * weight

    evidence = nk.identify(Gain(ggml, start=1.0, n=1024), 1024).evidence
    assert any("E[x^2] - E[x]^2, which this norm must compute" in line for line in evidence)


@THEIRS
def test_onnx_takes_the_variance_of_groups_in_one_pass(theirs):
    if theirs:
        onnx, runtime = installed("onnx"), installed("onnxruntime")
        given = [onnx.helper.make_tensor_value_info(name, 1, (2, 32, 8, 8)) for name in "xy"]
        ones, zeros = (onnx.numpy_helper.from_array(np.full(32, value, np.float32), str(value)) for value in (1, 0))
        node = onnx.helper.make_node("GroupNormalization", ["x", "1", "0"], ["y"], num_groups=4)
        graph = onnx.helper.make_graph([node], "norm", given[:1], given[1:], [ones, zeros])
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
        session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

        def norm(x):
            return session.run(None, {"x": x.float().numpy()})[0]
    else:
        # onnx 1.23.2, the function of GroupNormalization-21: onnx/defs/nn/defs.cc:2833 to 2841.
        def norm(x):
            rows = x.float().reshape(len(x), 4, -1)
            mean = rows.mean(-1, keepdim=True)
            variance = (rows * rows).mean(-1, keepdim=True) - mean * mean
            return ((rows - mean) / (variance + 1e-5).sqrt()).view_as(x)

    assert nk.identify(norm, (2, 32, 8, 8)).readings["conditioning"].value["cancels"]


def test_coremltools_multiplies_eps_by_the_largest_square():
    # coremltools 9.0, converters/mil/frontend/torch/ops.py:3144 to 3170.
    x = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, 0] = 100.0
    largest = x.abs().amax(-1, keepdim=True)
    y = x / (((x / largest).square().mean(-1, keepdim=True) + 1e-5).sqrt() * largest)
    spec = nk.identify_rows(x, y, torch.ones(64)).spec
    assert (spec.eps, spec.eps_placement) == (pytest.approx(1e-5 * 100**2), "inside")


@pytest.mark.parametrize(
    ("eps", "where"),
    [
        # Megatron-Bridge 067f987d, models/common/te_layers.py:47, in place of the configuration's 1e-6.
        (1e-5, "megatron"),
        # gpt-neox ea7aefd8, neox_args.py:197, in place of the 1e-6 that its converter writes.
        (1e-8, "gpt-neox"),
    ],
)
def test_an_eps_that_is_not_the_configurations(eps, where):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-5, 0, 64)[:, None]
    spec = nk.identify_rows(x, scaled(x, eps), torch.ones(64)).spec
    assert spec.eps == pytest.approx(eps, rel=1e-3), where


@THEIRS
def test_mlx_lm_leaves_latent_norms_at_mlxs_default_eps(theirs):
    if theirs:
        arguments = installed("mlx_lm.models.deepseek_v32").ModelArgs(rms_norm_eps=1e-6)
        norm = installed("mlx_lm.models.deepseek_v32").Indexer(arguments).k_norm
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 0, 64)[:, None]
        y = np.array(norm(installed("mlx.core").array(x.numpy())))
    else:
        # mlx-lm 0.32.2, mlx_lm/models/deepseek_v32.py:70 with mlx.nn.LayerNorm's default.
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 0, 64)[:, None]
        y = nn.functional.layer_norm(x, (128,), eps=1e-5)
    assert nk.identify_rows(x, y, torch.ones(128)).spec.eps == pytest.approx(1e-5, rel=1e-3)
