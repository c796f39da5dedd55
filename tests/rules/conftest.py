"""Tiny models to break, and what a test says of their inspection. Fixtures, as tests cannot import each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normkit as nk
from known_norms import fingerprint
from normkit import rules
from normkit.inspection import inspecting
from normkit.inspection.result import Inspection
from normkit.measurement.baseline import Baseline
from normkit.measurement.intent import stock_intent
from normkit.rules import Facts
from normkit.rules.finding import Finding

VOCABULARY, WIDTH = 99, 64


def _tiny(family: str, layers: int = 2, **options: Any) -> nn.Module:
    import transformers

    shared = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    if family == "GPT2":
        sizes = {"n_embd": WIDTH, "n_layer": layers, "n_head": 4}
    else:
        sizes = {
            "hidden_size": WIDTH,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 2 * WIDTH,
            "pad_token_id": 0,
        }
    config = getattr(transformers, f"{family}Config")(**(shared | sizes | options))
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def _train(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def _shape(model: nn.Module) -> nn.Module:
    """Rows of several lengths, as training leaves them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= torch.linspace(0.6, 1.4, len(parameter))[:, None]
    return model


class Block(nn.Module):
    """One head of causal attention behind a norm, and an MLP behind another."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norm(WIDTH), norm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        query, key, value = self.query_key_value(self.norm_1(x))[:, None].chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0]
        return x + self.mlp(self.norm_2(x))


class Plain(nn.Module):
    """A model that no library knows: it has no config, so nothing tells what was intended."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm, layers: int = 2, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.embedding.weight.data *= scale
        self.blocks = nn.ModuleList(Block(norm) for _ in range(layers))
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# The files whose rules ask for rows that move each other, and that of healthy families.
LEAKING = ("test_axes.py", "test_backend.py", "test_coupling.py", "test_families.py", "test_media_families.py")


@pytest.fixture(scope="module", autouse=True)
def _rows_are_taken_for_independent(request: pytest.FixtureRequest) -> Iterator[None]:
    """In `make test`, but for some files: to find that out takes five more runs of each model."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.pluginmanager.hasplugin("thinned") and request.path.name not in LEAKING:
            patch.setattr(inspecting, "find_leaks", lambda *_: ())
        yield


@pytest.fixture(autouse=True)
def _quiet():
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture
def models():
    """`tiny(family)`, a fresh transformers model; `plain()`, one without a config; `train(model)` and
    `shape(model)`, in place: gains and biases as if trained, and matrices."""
    return SimpleNamespace(tiny=_tiny, plain=Plain, train=_train, shape=_shape)


_KNOWN: dict[object, Inspection] = {}


def _inspected(model: nn.Module, tokens: int = 40, intent: Baseline | None = None) -> Inspection:
    """Models without a fault are the same in many tests, and inspected once."""
    ids = torch.randint(3, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(0))
    known = fingerprint(model, own=(Plain, Block)) if intent is None else None
    if known is None:
        return nk.inspect(model, {"input_ids": ids}, intent=intent)
    key = known, tokens, rules.RULES
    if key not in _KNOWN:
        _KNOWN[key] = nk.inspect(model, {"input_ids": ids})
    return _KNOWN[key]


@pytest.fixture
def inspected():
    """`inspected(model)`: the inspection on two rows of random tokens, held to an intent if one is given."""
    return _inspected


@pytest.fixture(scope="session")
def healthy() -> Inspection:
    """The inspection of `tiny("GPT2")` as it is."""
    return _inspected(_tiny("GPT2"))


@pytest.fixture
def facts_of():
    """`facts_of(inspection, model)`: what the rules were given."""

    def gather(inspection: Inspection, model: nn.Module) -> Facts:
        return Facts(
            model=inspection.model,
            sites=inspection.sites,
            blocks=inspection.blocks,
            attentions=inspection.attentions,
            final_norm=inspection.final_norm,
            intent=stock_intent(model),
        )

    return gather


@pytest.fixture
def finding():
    """`finding(inspection, rule)`: the rule's finding, which is the only error there is if it is one."""

    def only(inspection: Inspection, rule: str) -> Finding:
        found = {finding.rule: finding for finding in inspection.findings}
        assert rule in found, f"expected {rule}, found {sorted(found)}"
        assert [each.rule for each in inspection.findings if each.severity == "error" and each.rule != rule] == []
        assert next(check for check in inspection.checks if check.rule == rule).status == "finding"
        return found[rule]

    return only


@pytest.fixture
def status():
    """`status(inspection, rule)`: what became of a rule, where nothing is an error."""

    def of(inspection: Inspection, rule: str) -> str:
        assert [each.rule for each in inspection.findings if each.severity == "error"] == []
        return next(check.status for check in inspection.checks if check.rule == rule)

    return of
