"""`massive`: massive activations and attention sinks of a trained language model, on one window of text a seed."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from normkit.checkpoint.build_model import quiet_libraries
from normkit.errors import InputError
from normkit.identification.state import hooked
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.chart import Chart, Curves, arm_lines
from normkit.study.corpus import text_of_the_library
from normkit.study.result import Arm, Claim, Condition, Study, budget
from normkit.study.statistics import Measurement, Paired, value_of

ARM = "the model"
_LEAST, _RATIO = 100.0, 1000.0
"""Magnitude of a massive activation, and its ratio to the median of its hidden state (Sun et al. 2024, section 2)."""


def folder_of(model: str) -> Path:
    """The folder of a model: one that ships, one of the folder that NORMKIT_REAL_MODELS names, or a path.

    Raises:
        InputError: If there is no such folder.
    """
    shipped = Path(str(files("normkit"))) / "demo" / model
    folder = next(filter(Path.is_dir, (shipped, Path(os.environ.get("NORMKIT_REAL_MODELS", ".")) / model)), None)
    if folder is None:
        raise InputError(f"expected a folder with a trained model, got {model!r}: --set model=PATH")
    return folder


def _measure(context: ArmContext, _arm: Arm) -> Measurement:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = folder_of(context["model"])
    with quiet_libraries():
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").to(context.device).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer.json").exists() else None
    _, text = text_of_the_library()

    def ids(place: int) -> Tensor:
        part = text[(place * 100_003) % (len(text) - 20_000) :][: 12 * context["window"]]
        tokens = tokenizer(part.decode(errors="ignore"), verbose=False).input_ids if tokenizer else list(part)
        return torch.tensor([tokens[: context["window"] + 1]], device=context.device)

    return measured(model, ids(context.seed), [ids(1_000 + 2 * context.seed + other) for other in range(2)])


@torch.no_grad()
def measured(model: Any, ids: Tensor, others: list[Tensor]) -> Measurement:
    """Find the massive activations of one window, change them where they are born, and count attention to them.

    Args:
        model: A causal language model whose decoder has `layers`.
        ids: Token ids (1, tokens + 1).
        others: Windows of as many tokens, over which the mean of each massive activation is taken.
    """
    run = model(ids[:, :-1], output_hidden_states=True, output_attentions=True)
    # The last state is after the final norm.
    states = [state[0].abs() for state in run.hidden_states[1:-1]]
    ratios = [(state.amax() / state.median()).item() for state in states]
    found = [((state > _LEAST) & (state > _RATIO * state.median())).nonzero() for state in states]
    largest = max(range(len(states)), key=lambda layer: ratios[layer])
    birth = next((layer for layer, places in enumerate(found) if len(places)), largest)
    # If there is none, the largest entry stands for them, and the control of the claims fails.
    places = found[birth] if len(found[birth]) else (states[birth] == states[birth].amax()).nonzero()[:1]
    rows, columns = places.unbind(-1)
    here = run.hidden_states[birth + 1][0, rows, columns]
    means = torch.stack(
        [model(other[:, :-1], output_hidden_states=True).hidden_states[birth + 1][0, rows, columns] for other in others]
    ).mean(0)
    # The next largest entries of other tokens, as many as are changed.
    rest = states[birth].clone()
    rest[rows] = 0
    beside = rest.flatten().topk(len(places)).indices
    whole = loss_with(model, ids)
    token = int(rows[0])
    later = [weights[0, :, token + 1 :, token].mean().item() for weights in run.attentions[birth + 1 :]]
    return {
        "ratios": ratios,
        "ratio": max(ratios),
        "count": max(map(len, found)),
        "first": float(bool((rows == 0).all())),
        "spread": ((here - means).abs() / means.abs()).max().item(),
        "zero": loss_with(model, ids, birth, rows, columns, torch.zeros_like(here)) - whole,
        "mean": loss_with(model, ids, birth, rows, columns, means) - whole,
        "beside": loss_with(model, ids, birth, beside // rest.shape[1], beside % rest.shape[1], torch.zeros_like(here))
        - whole,
        "sink": sum(later) / len(later) if later else 0.0,
        "loss": whole,
    }


def loss_with(
    model: Any, ids: Tensor, layer: int = -1, rows: Any = None, columns: Any = None, values: Any = None
) -> float:
    """The loss with some entries of the stream after a layer replaced; layer -1 replaces none."""

    def replace(_module: Any, _inputs: Any, output: Any) -> Any:
        stream = (output[0] if isinstance(output, tuple) else output).clone()
        stream[0, rows, columns] = values
        return (stream, *output[1:]) if isinstance(output, tuple) else stream

    replaced = [model.get_decoder().layers[layer]] if layer >= 0 else []
    with hooked(module.register_forward_hook(replace) for module in replaced):
        return F.cross_entropy(model(ids[:, :-1]).logits[0].float(), ids[0, 1:]).item()


def _charts(settings: Settings, seeds: list[Paired]) -> tuple[Chart, ...]:
    layers = range(1, len(seeds[0][ARM]["ratios"]) + 1)
    return (
        Curves(
            name="massive-ratios",
            title="Largest activation over the median one",
            caption=f"Magnitudes after each layer of {Path(settings['model']).name}; medians and ranges over windows.",
            description="Where the curve jumps, massive activations are born; where it falls, they are taken back.",
            x_label="layer",
            y_label="largest over median",
            panels=(("", arm_lines(seeds, (ARM,), "ratios", layers)),),
            y_log=True,
        ),
    )


_SUN = "Sun et al. 2024, arXiv:2402.17762"
_CONTROL = Condition(
    says="there are massive activations: the largest is at least 1,000 times the median",
    statistic=value_of(ARM, "ratio"),
    low=_RATIO,
    source=f"the definition of {_SUN}, section 2",
    bound="paper",
)


def _is(says: str, name: str, published: str, bounds: tuple[float, float], source: str) -> Condition:
    return Condition(
        says=says, statistic=value_of(ARM, name), low=bounds[0], high=bounds[1], published=published, source=source
    )


_INFINITE = float("inf")
_CLAIMS = (
    Claim(
        says="A trained language model has a few massive activations, at its first token",
        source=f"{_SUN}, section 2",
        control=_CONTROL,
        conditions=(
            _is("at most ten of them in a layer", "count", "fewer than ten", (-_INFINITE, 10), "the paper's count"),
            _is("where they are born, all are at the first token", "first", "the first token", (1, 1), "all windows"),
        ),
    ),
    Claim(
        says="Massive activations act as biases: their value hardly depends on the input",
        source=f"{_SUN}, section 4",
        control=_CONTROL,
        conditions=(
            _is("they are within a tenth of their mean over other texts", "spread", "constant", (0, 0.1), "a tenth"),
            _is("set to that mean, they change the loss by 0.05 nats at most", "mean", "none", (-0.05, 0.05), "0.05"),
            _is("set to 0, they raise it by 1 nat at least", "zero", "the model breaks", (1, _INFINITE), "one nat"),
            _is("others set to 0 raise it by 0.1 at most", "beside", "none", (-_INFINITE, 0.1), "a tenth of that"),
        ),
    ),
    Claim(
        says="Attention concentrates on the token of massive activations",
        source=f"{_SUN}, section 5; Xiao et al. 2023, arXiv:2309.17453, for attention sinks",
        control=_CONTROL,
        conditions=(
            _is("after their birth it has a third of all attention", "sink", "most", (1 / 3, 1), "a third is ours"),
        ),
    ),
)

STUDY = Study(
    name="massive",
    title="Massive activations and attention sinks",
    question="Has a trained model activations a thousand times the median, and does attention sink into their token?",
    claims=_CLAIMS,
    quick=budget(seeds=3, model="rmsnorm", window=128),
    full=budget(seeds=10, window=512),
    arms=lambda _settings: (Arm(name=ARM),),
    measure=_measure,
    charts=_charts,
    data="the held-out source of Python's standard library, one window for each seed",
    regime="one trained model: by default the Llama that ships, of 330,000 parameters, which is too small to have "
    "massive activations; --set model=PATH takes any causal model with a list of layers",
)
