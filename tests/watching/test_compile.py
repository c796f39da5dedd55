"""Watched models that are compiled: no graph break, two graphs, and the counts of the eager model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from normkit.inspection.result import Inspection
from small_training import VOCABULARY, Run, Transformer, is_of_data

# What a compiler warns of itself, of tensors it looks at and of its own parts.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SEEN_NEVER = "a compiler had traced the model before the watch put its hooks in"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Small(nn.Module):
    """Blocks of one norm, as a compiler needs seconds for what counts each. No forward of it is replaced."""

    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.blocks = nn.ModuleList(Branch() for _ in range(blocks))
        self.checkpointing = "none"

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointing == "none" or not self.training:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "re-entrant")
        return self.head(x)


def attentive() -> nn.Module:
    """A block with norms in modules and in calls, an attention, and its final norm."""
    model = Transformer(blocks=1)
    # Dropout draws other numbers in a compiled model.
    model.blocks[0].dropout.p = 0.0
    return model


def assert_counted_alike(compiled: Run, eager: Run) -> None:
    one, other = compiled.watch.inspection(), eager.watch.inspection()
    assert compiled.said == eager.said == []
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-5)
    assert counts(one) == counts(other)
    assert all(value > 0 for series in one.training.of("activation gradient") for value in series.values)
    # Batches and labels are not seen where the model's own call is compiled.
    seen = ([each for each in every.training.series if not is_of_data(each)] for every in (one, other))
    for mine, theirs in zip(*seen, strict=True):
        assert (mine.quantity, mine.path, mine.steps) == (theirs.quantity, theirs.path, theirs.steps)
        # Weights that a compiled step moved differ in their last digits, and Adam's first steps divide by gradients
        # near zero.
        assert mine.values == pytest.approx(theirs.values, rel=1e-2, abs=1e-4, nan_ok=True), mine


def counts(inspection: Inspection) -> list[tuple[int, ...]]:
    sites = [(site.calls, site.input.rows, site.output.rows, site.input.zero_rows) for site in inspection.sites]
    assert sites
    assert all(all(site[:3]) for site in sites)
    return [*sites, *((each.sampled_rows, each.heads) for each in inspection.attentions)]


def compiled_whole(run: Run, backend: Any, steps: int = 3) -> Run:
    """`torch.compile(model)`, and the watch is given the model."""
    call = torch.compile(run.model, backend=backend, fullgraph=True)
    return run.go(steps=steps, body=lambda each: each.step(call), batch=(run.batch()[:, :-1],))


def given_compiled(run: Run, backend: Any, steps: int = 3) -> Run:
    call = torch.compile(run.model, backend=backend, fullgraph=True)
    run.batch()
    return run.go(steps=steps, body=lambda each: each.step(call), given=call)


def in_place(run: Run, backend: Any, steps: int = 3) -> Run:
    run.model.compile(backend=backend, fullgraph=True)
    return run.go(steps=steps, batch=(run.batch()[:, :-1],))


def eager(run: Run, steps: int = 3, **options: Any) -> Run:
    """After as many random batches as the compiled run."""
    run.batch()
    return run.go(steps=steps, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "way",
    [
        given_compiled,
        # Asked of a larger model below.
        pytest.param(compiled_whole, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param(in_place, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_is_two_graphs_and_counts_alike(way: Callable[..., Run]):
    backend = CompileCounterWithBackend("eager")
    compiled = way(Run(Small), backend)
    assert backend.frame_count == 2
    assert_counted_alike(compiled, eager(Run(Small)))


@pytest.mark.slow
def test_norms_and_attentions_called_as_functions_count_alike():
    backend = CompileCounterWithBackend("eager")
    compiled = compiled_whole(Run(attentive), backend)
    assert backend.frame_count == 2
    assert len(counts(compiled.watch.inspection())) == 6
    assert_counted_alike(compiled, eager(Run(attentive)))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_blocks_compiled_one_by_one_count_alike():
    """More of them than a compiler makes graphs of one forward."""
    run = Run(lambda: Small(3))
    with torch._dynamo.config.patch(recompile_limit=2):
        for block in run.model.blocks:
            block.compile(backend="eager", fullgraph=True)
        run.batch()
        run.go(steps=3)
        assert torch._dynamo.config.recompile_limit == 2
    assert_counted_alike(run, eager(Run(lambda: Small(3))))


def one_norm() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8), nn.Linear(8, VOCABULARY))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor_counts_alike():
    # A step that is measured: the other graph, a sum a place, would take as long again.
    compiled = compiled_whole(Run(one_norm), "inductor", 1)
    assert len(compiled.watch.inspection().training.of("activation gradient")) == 1
    assert_counted_alike(compiled, eager(Run(one_norm), 1))


@pytest.mark.slow
# Traced with its model, a checkpoint is the same operator of either kind.
@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("way", "kind"), [("whole", "not re-entrant"), ("blocks", "re-entrant"), ("blocks", "not re-entrant")]
)
def test_repetitions_by_a_checkpoint_in_a_compiled_model_are_not_counted(way: str, kind: str):
    def build() -> nn.Module:
        # What stands before the forward of an attention notes that it runs: a compiler would not have that repeated.
        model = attentive() if way == "whole" else Small()
        model.checkpointing = kind
        return model

    run = Run(build)
    if way == "whole":
        compiled_whole(run, "aot_eager")
    else:
        run.model.blocks[0].compile(backend="aot_eager", fullgraph=True)
        eager(run)
    assert {site.calls for site in run.watch.inspection().sites} == {1}
    assert_counted_alike(run, eager(Run(build)))


@pytest.mark.slow
def test_shapes_that_change_are_two_graphs_and_counted_alike():
    def body(run: Run, call: Any = None) -> None:
        step = len(run.losses)
        run.step(call, run.batch(rows=2 + step % 2, tokens=9 + 3 * step))

    run, backend = Run(Small), CompileCounterWithBackend("eager")
    call = torch.compile(run.model, backend=backend, fullgraph=True, dynamic=True)
    run.go(steps=5, body=lambda each: body(each, call), batch=(run.batch()[:, :-1],))
    assert backend.frame_count == 2
    assert_counted_alike(run, eager(Run(Small), 5, body=body))


@pytest.mark.slow
def test_a_model_compiled_too_early_is_told_of_in_one_line():
    run = Run(Small)
    call = torch.compile(run.model, backend="eager")
    run.step(call)
    run.go(body=lambda each: each.step(call), batch=(run.batch()[:, :-1],))
    assert len(run.said) == 1
    assert f"0 of 2 norms and blocks were seen in the first step: {SEEN_NEVER}" in run.said[0]


@pytest.mark.slow
def test_blocks_compiled_too_early_are_told_of_in_one_line():
    run = Run(Small)
    run.model.blocks[0].compile(backend="eager")
    run.step()
    run.go()
    assert len(run.said) == 1
    assert "1 of 2 norms and blocks were seen in the first step" in run.said[0]
    assert SEEN_NEVER in run.said[0]


@pytest.mark.slow
def test_a_model_compiled_too_early_is_traced_again_if_a_forward_is_replaced():
    """The watch stands before the forward of an attention, and a compiler looks whether that is the one it traced."""
    run, backend = Run(attentive), CompileCounterWithBackend("eager")
    call = torch.compile(run.model, backend=backend)
    run.step(call)
    run.go(steps=1, body=lambda each: each.step(call), batch=(run.batch()[:, :-1],))
    assert run.said == []
    assert {site.calls for site in run.watch.inspection().sites} == {1}


@pytest.mark.slow
def test_a_model_that_no_call_shows_is_told_of_in_one_line():
    run = Run(Small)
    call = torch.compile(run.model, backend="eager", fullgraph=True)
    run.go(body=lambda each: each.step(call))
    assert len(run.said) == 1
    assert "give it batch=" in run.said[0]


def gpt_2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, use_cache=False))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **layers, use_cache=False))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("build", [gpt_2, llama])
def test_models_of_transformers_are_two_graphs_and_count_alike(build: Callable[[], nn.Module]):
    def logits(call: Any) -> Any:
        return lambda tokens: call(input_ids=tokens).logits

    backend = CompileCounterWithBackend("eager")
    runs = [Run(build, rate=1e-3), Run(build, rate=1e-3)]
    call = torch.compile(runs[0].model, backend=backend, fullgraph=True)
    for run, called in zip(runs, (call, runs[1].model), strict=True):
        batch = {"input_ids": run.batch()[:, :-1]}
        run.go(steps=3, body=lambda each, called=called: each.step(logits(called)), batch=batch)
    assert backend.frame_count == 2
    assert len(runs[0].watch.inspection().attentions) == 1
    assert_counted_alike(*runs)
