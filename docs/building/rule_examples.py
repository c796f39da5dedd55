"""A runnable program for each rule: the smallest failing model, from the lines of rule_examples.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from textwrap import indent
from typing import Any

EXAMPLES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""What is special in the example of each rule."""

_WRONG = """

class Wrong(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        {attributes}

    def forward(self, x):
{formula}

"""
_SHIPPED = """\
model = transformers.AutoModelForCausalLM.from_pretrained(demo.directory("{name}"))
"""
_IDS = "ids = torch.tensor(list(demo.text().encode())[:128]).view(2, 64)\n"
_NORMS = {"layernorm": "model.transformer.h[1].ln_1", "rmsnorm": "model.model.layers[1].input_layernorm"}
_LOSS = "loss = F.cross_entropy(model(input_ids=ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())\n"
_RUN = """\
with nk.watch(model, optimizer, every=5, say=lambda line: None) as watch:
    for step in range(40):
{step}
    for found in watch.findings:
        print(found.rule, found.title)
"""


def program(rule: str) -> str:
    """The example of a rule; "" where it is told in words."""
    example = EXAMPLES[rule]
    if "words" in example:
        return ""
    return _run(example) if "run" in example else _inspection(example)


def _inspection(example: dict[str, Any]) -> str:
    name = example.get("ships", "layernorm")
    model = example.get("model", _SHIPPED.format(name=name))
    fault = example.get("fault", f"{_NORMS[name]} = Wrong({_NORMS[name]})\n")
    parts = ["import torch\nimport transformers\n\nimport normkit as nk\nfrom normkit import demo\n"]
    if "formula" in example:
        eps = "variance_epsilon" if name == "rmsnorm" else "eps"
        attributes = {"weight": "weight", "bias": "bias", "eps": example.get("eps", eps)}
        used = {ours: theirs for ours, theirs in attributes.items() if f"self.{ours}" in example["formula"]}
        kept = (
            ", ".join(f"self.{ours}" for ours in used) + " = " + ", ".join(f"norm.{theirs}" for theirs in used.values())
        )
        formula = indent(example["formula"].strip(), " " * 8)
        parts.append(_WRONG.format(attributes=kept if used else "", formula=formula))
    parts += ["" if "formula" in example else "\n", model, "" if "ids =" in model else _IDS]
    if example.get("declared"):
        parts.append('nk.inspect(model, {"input_ids": ids}, intent="intent.json")  # writes what it is\n')
    parts += ["\n", fault, "\n", example.get("inspect", 'inspection = nk.inspect(model, {"input_ids": ids})\n')]
    if example.get("declared"):
        parts[-1] = 'inspection = nk.inspect(model, {"input_ids": ids}, intent="intent.json")\n'
    parts.append("for found in inspection.findings:\n    print(found.rule, found.title)\n")
    return "".join(parts)


def _run(example: dict[str, Any]) -> str:
    model = example.get("model", 'model = build("layernorm")\n')
    special = "" if example["run"] is True else example["run"]
    imports = "import torch\nimport torch.nn.functional as F\n\nimport normkit as nk\nfrom normkit import demo\n"
    imports += "" if "model" in example else "from normkit.demo.architecture import build\n"
    has_ids = "ids" in example.get("loss", _LOSS)
    draw = "ids = text[torch.randint(len(text) - 129, (2, 1)) + torch.arange(129)]\n" if has_ids else ""
    text = "text = torch.tensor(list(demo.text().encode()))\n" if has_ids else ""
    step = [draw, special, example.get("loss", _LOSS), example.get("clear", "optimizer.zero_grad()\n")]
    step.append("loss.backward()\nwatch.step(loss)\noptimizer.step()\n")
    optimizer = example.get("optimizer", "optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)\n")
    fault = example.get("fault", "")
    body = [imports, "\ntorch.manual_seed(0)\n", model, text, fault, optimizer, "\n"]
    return "".join(body) + _RUN.format(step=indent("".join(step), " " * 8))
