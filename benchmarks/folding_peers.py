"""The folding code of other projects on one checkpoint, beside `normkit fold`: error, time, memory, does it load.

    python benchmarks/folding_peers.py FOLDER DST normkit-gain normkit-rotate    # in normkit's environment
    python benchmarks/folding_peers.py FOLDER DST flashnorm spinquant            # where their packages are
    python benchmarks/folding_peers.py FOLDER DST torchao-spinquant torchao-int8 torchao-int4 modelopt-awq modelopt-fold
    python benchmarks/folding_peers.py FOLDER DST --compare                      # in normkit's environment again

Each tool runs in a process of its own and leaves a folder below DST. FlashNorm is of the package transformer-tricks,
SpinQuant's R1 and R2 are those of llmcompressor with a random Hadamard matrix (its plain one takes powers of two only).
torchao's SpinQuant knows one model class of its own, so that the modules here are shown to it under that class's names.
modelopt-awq is Model-Optimizer's INT4 AWQ as it exports it; modelopt-fold the same without rounding: what its export
makes of norms and of the maps that read them, and scales that no norm takes put back into their maps.
--compare loads each result in the stock class in float64 and tells how its logits differ from those of FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

TOOLS = (
    *("normkit-gain", "normkit-rotate", "flashnorm", "spinquant", "torchao-spinquant", "torchao-int8", "torchao-int4"),
    *("modelopt-awq", "modelopt-fold"),
)


def torchao_spinquant(source: str, target: str, dtype: str) -> None:
    """R1 and R2 of torchao.prototype.spinquant, which gives modules other names."""
    import torch
    from torchao.prototype.spinquant import apply_spinquant
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.config.tie_word_embeddings = False
    shown = torch.nn.Module()
    body, config = model.model, model.config
    shown.tok_embeddings, shown.norm, shown.output = body.embed_tokens, body.norm, model.lm_head
    shown.layers = torch.nn.ModuleList()
    for layer in body.layers:
        block, attention, mlp = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
        names = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
        for name, own in names.items():
            setattr(attention, name, getattr(layer.self_attn, own))
        mlp.w1, mlp.w3, mlp.w2 = layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj
        block.attention, block.feed_forward = attention, mlp
        block.attention_norm, block.ffn_norm = layer.input_layernorm, layer.post_attention_layernorm
        shown.layers.append(block)
    shown.config = argparse.Namespace(dim=config.hidden_size, head_dim=config.head_dim)
    torch.manual_seed(0)
    apply_spinquant(shown, use_r1=True, use_r2=True, use_r4=False, qkv_split=True)
    model.save_pretrained(target)


def torchao_weights(source: str, target: str, dtype: str, bits: int) -> None:
    """torchao's weight-only quantization, by way of transformers."""
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
    from transformers import AutoModelForCausalLM, TorchAoConfig

    four = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    how = TorchAoConfig(Int8WeightOnlyConfig() if bits == 8 else four)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), quantization_config=how)
    model.save_pretrained(target)


def modelopt(source: str, target: str, dtype: str, *, rounds: bool) -> None:
    """INT4 AWQ of Model-Optimizer, exported; or its folding alone, without rounding."""
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    ids = torch.tensor([AutoTokenizer.from_pretrained(source)(Path(argparse.__file__).read_text()[:900])["input_ids"]])
    mtq.quantize(model, mtq.INT4_AWQ_CFG, lambda each: each(ids))
    if rounds:
        export_hf_checkpoint(model, export_dir=target)
        return
    requantize_resmooth_fused_llm_layers(model)
    found = model.state_dict()
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for name, value in plain.state_dict().items():
            scale = found.get(f"{name.removesuffix('.weight')}.input_quantizer._pre_quant_scale")
            value.copy_(found[name] if scale is None else found[name] * scale)
    plain.save_pretrained(target)


def made_by(tool: str, source: str, target: str, dtype: str) -> None:
    """Fold a checkpoint with one tool; prints seconds, processor time and memory as JSON."""
    begun = time.perf_counter()
    if tool == "flashnorm":
        import transformer_tricks

        # A folder is meant; the Hub need not be asked.
        transformer_tricks.repo_exists = lambda _name: False
        transformer_tricks.flashify_repo(source, target)
    elif tool == "spinquant":
        import torch
        from llmcompressor import oneshot
        from llmcompressor.modifiers.transform import SpinQuantModifier
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
        oneshot(model=model, recipe=SpinQuantModifier(rotations=["R1", "R2"], transform_type="random-hadamard"))
        model.save_pretrained(target)
    elif tool == "torchao-spinquant":
        torchao_spinquant(source, target, dtype)
    elif tool.startswith("torchao-int"):
        torchao_weights(source, target, dtype, int(tool[-1]))
    elif tool.startswith("modelopt"):
        modelopt(source, target, dtype, rounds=tool == "modelopt-awq")
    else:
        from normkit.checkpoint import fold

        operations = ["rotate"] if tool == "normkit-rotate" else ["gain", "final"]
        fold(source, target, operations=operations, untie=True, dtype="float32" if dtype == "float32" else "same")
    used = resource.getrusage(resource.RUSAGE_SELF)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    told = {"seconds": time.perf_counter() - begun, "cpu": used.ru_utime + used.ru_stime}
    print(json.dumps(told | {"peak": int(peak.split()[1]) * 1024}))


def compare(source: Path, folders: list[Path]) -> None:
    """Logits of each folder beside those of the source, in float64, on 192 tokens of Python's argparse."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = Path(argparse.__file__).read_text()[2000:3000]
    ids = torch.tensor([AutoTokenizer.from_pretrained(source)(text)["input_ids"][:192]])

    def logits(folder: Path) -> torch.Tensor:
        # A model that is quantized computes in its own dtype.
        is_quantized = "quantization_config" in json.loads((folder / "config.json").read_text())
        dtype = "auto" if is_quantized and folder.name.startswith("torchao") else torch.float64
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        with torch.no_grad():
            return model(ids).logits.double()

    due = logits(source)
    before = due.log_softmax(-1)
    print(f"{'':28}{'largest':>12}{'KL':>12}{'same first':>12}")
    for folder in folders:
        try:
            found = logits(folder)
        except (ImportError, OSError, ValueError, AttributeError) as error:
            print(f"{folder.name:28} {type(error).__name__}: {str(error)[:160]}")
            # A second try without what a quantizer wrote into the config.
            path = folder / "config.json"
            config = json.loads(path.read_text())
            if config.pop("quantization_config", None) is None:
                continue
            path.write_text(json.dumps(config))
            found = logits(folder)
        after = found.log_softmax(-1)
        apart = float((before.exp() * (before - after)).sum(-1).mean())
        same = float((found.argmax(-1) == due.argmax(-1)).double().mean())
        print(f"{folder.name:28}{float((found - due).abs().max()):12.3g}{apart:12.2g}{same:12.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    # Python 3.11 finds no tool at all among `choices`.
    parser.add_argument("tool", nargs="*", help=", ".join(TOOLS))
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.tool) - {*TOOLS}:
        parser.error(f"expected some of {', '.join(TOOLS)}, got {min(unknown)}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.one:
        made_by(options.tool[0], str(options.source), str(options.target), options.dtype[0])
        return
    options.target.mkdir(exist_ok=True)
    for tool in options.tool:
        for dtype in options.dtype:
            folder = options.target / f"{tool}-{dtype}"
            command = [sys.executable, __file__, str(options.source), str(folder), tool, "--one", "--dtype", dtype]
            done = subprocess.run(command, capture_output=True, text=True)
            # The last line that a failed tool writes says why.
            print(f"{folder.name:28}", (done.stdout if done.returncode == 0 else done.stderr).strip().split("\n")[-1])
    if options.compare:
        compare(options.source, sorted(path for path in options.target.iterdir() if path.is_dir()))


if __name__ == "__main__":
    main()
