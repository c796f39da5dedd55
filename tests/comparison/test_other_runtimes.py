"""The recipes of docs/how-to/record-other-runtimes.md: each runs where its runtime is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file
from torch import nn

from helpers import ROOT, SOURCE
from normkit.comparison.recording import Recording
from normkit.demo.architecture import byte_tokenizer
from tiny_models import tiny

# A Python that has the group `runtimes`, if this one has not.
PYTHON = os.environ.get("NORMKIT_RUNTIMES_PYTHON", sys.executable)


def run(folder: Path, name: str, *arguments: object) -> str:
    """Run a recipe in a folder, beside the recorder; warnings are errors."""
    for file in (ROOT / "examples" / name, SOURCE / "comparison" / "normkit_recorder.py"):
        shutil.copy(file, folder)
    command = [PYTHON if name != "record_onnxruntime.py" else sys.executable, name, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def needs(package: str) -> pytest.MarkDecorator:
    missing = sys.executable == PYTHON and importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs {package}: pip install --group runtimes")


def fields(entry, *names):
    """The fields of a passport's spec that the rows decide."""
    return {name: getattr(entry.passport.spec, name) for name in names}


@pytest.mark.exhaustive
@pytest.mark.slow
@needs("mlx")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        # mlx-lm takes each sixth layer's mask for all that look at everything.
        ("gemma3", {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]}),
    ],
)
def test_mlx(tmp_path, family, options):
    model, _ = tiny(family, dtype=torch.float32, **options)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer(97).save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("!\"#$ %&'() *+,-. 012345")
    printed = run(tmp_path, "record_mlx.py", "model", "text", "a.safetensors")
    assert printed.startswith("wrote a.safetensors: ")
    norms = Recording.read(tmp_path / "a.safetensors").norms
    modules = dict(model.named_modules())
    assert sorted(norms) == sorted(name for name in modules if name.endswith("norm"))
    for path, norm in norms.items():
        # float32 arithmetic of another order.
        torch.testing.assert_close(modules[path](norm.input), norm.output, rtol=1e-4, atol=1e-5)
        assert torch.equal(norm.weight, modules[path].weight)


@pytest.mark.exhaustive
@pytest.mark.slow
@needs("flax")
def test_flax(tmp_path):
    run(tmp_path, "record_flax.py")
    book = Recording.read(tmp_path / "flax.safetensors").book
    layer, rms = sorted(book.entries, key=lambda entry: entry.path)
    assert (layer.path, rms.path) == ("layers_0", "nnx_norm")
    names = ("centre_numerator", "eps", "eps_placement", "weight_offset", "has_bias")
    assert fields(layer, *names) == dict(zip(names, (True, 1e-6, "inside", 0.0, True), strict=True))
    assert fields(rms, *names[:-1]) == dict(zip(names, (False, 1e-6, "inside", 0.0), strict=False))


def chain(folder: Path) -> None:
    """A model of two norms, one operator each."""
    random, width = np.random.default_rng(0), 32
    table = random.standard_normal((500, width)) * np.logspace(-4, 1, 500)[:, None] + 0.2
    arrays = {"E": table, "g": random.uniform(0.5, 1.5, width), "b": random.standard_normal(width), "W": table.T}
    nodes = [
        helper.make_node("Gather", ["E", "ids"], ["e"]),
        helper.make_node("LayerNormalization", ["e", "g", "b"], ["l"], name="/first", epsilon=1e-5, axis=-1),
        helper.make_node("RMSNormalization", ["e", "g"], ["r"], name="/second", epsilon=1e-6, axis=-1),
        helper.make_node("Add", ["l", "r"], ["s"]),
        helper.make_node("MatMul", ["s", "W"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["b", "s"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", "s", 500])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), folder / "m.onnx")
    np.save(folder / "ids.npy", random.integers(0, 500, (8, 64)))


@pytest.mark.slow
def test_onnxruntime(tmp_path):
    chain(tmp_path)
    printed = run(tmp_path, "record_onnxruntime.py", "m.onnx", "ids.npy", "a.safetensors")
    assert printed == "wrote a.safetensors: 2 norms\n"
    first, second = Recording.read(tmp_path / "a.safetensors").book.entries
    assert fields(first, "centre_numerator", "eps", "has_bias") == {
        "centre_numerator": True,
        "eps": 1e-5,
        "has_bias": True,
    }
    assert fields(second, "centre_numerator", "eps") == {"centre_numerator": False, "eps": 1e-6}
    assert load_file(tmp_path / "a.safetensors")["outputs"].shape == (512, 500)


class RMSNorm(nn.Module):
    """As in vLLM and SGLang: fused with the residual, it writes over both of its inputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x, residual=None):
        total = x.clone() if residual is None else x.add_(residual)
        if residual is not None:
            residual.copy_(total)
        y = total * torch.rsqrt(total.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype) * self.weight
        return y if residual is None else (x.copy_(y), residual)


class Served(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential()
        self.model.first, self.model.norm = RMSNorm(), RMSNorm()
        self.model.forward = lambda x: self.model.norm(self.model.first(x), residual=x)[0]

    def forward(self, x):
        return self.model(x)


@pytest.fixture
def serving(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.syspath_prepend(SOURCE / "comparison")
    import record_serving

    yield record_serving
    for name in ("record_serving", "normkit_recorder"):
        sys.modules.pop(name)


def test_the_hooks_of_served_models_keep_what_fused_norms_write_over(serving, tmp_path):
    """vLLM and SGLang are not installed: their norms' call and their hook are stood in for."""
    model = Served().bfloat16()
    x = torch.randn(5, 16).bfloat16()
    kept = x.clone()
    model.model.register_forward_pre_hook(serving.of_sglang({"file": str(tmp_path / "a.safetensors")}))
    with torch.no_grad():
        model(x)
    norms = Recording.read(tmp_path / "a.safetensors").norms
    assert list(norms) == ["model.first", "model.norm"]
    first, last = norms["model.first"], norms["model.norm"]
    assert torch.equal(first.input, kept)
    assert first.residual is None
    assert torch.equal(last.residual, kept)
    assert torch.equal(last.input, first.output)
    assert torch.equal(last.weight, model.model.norm.weight)
    assert not torch.equal(last.input, last.output)
    assert serving.as_numpy(x).dtype == ml_dtypes.bfloat16
