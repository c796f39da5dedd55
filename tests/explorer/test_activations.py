"""What enters the norms of real models, token by token, and that the embedded numbers give what the norms return."""

from __future__ import annotations

import base64
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AlbertConfig, AlbertModel, Qwen3Config, Qwen3ForCausalLM, T5Config, T5ForConditionalGeneration

from normkit.checkpoint.loading import load_model
from normkit.errors import InputError
from normkit.explorer.activations import activations
from normkit.explorer.exploration import explore_models
from normkit.explorer.projection import principal_basis

pytestmark = pytest.mark.slow


def numbers(site: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(site["floats"]), "<f4").astype(np.float64).reshape(site["count"], 7)


def returned(site: dict) -> np.ndarray:
    """What the page computes of a site: its last stage, in the basis."""
    found = numbers(site)
    c, r, d = found[:, :3], found[:, 3:4], found[:, 4:]
    across = np.sqrt((c[:, 1:] ** 2).sum(1, keepdims=True) + r**2)
    is_centred = site["mode"] == "layer"
    size = (across if is_centred else np.hypot(c[:, :1], across)) / math.sqrt(site["n"])
    moved = d if is_centred else d + c[:, :1] / math.sqrt(site["n"]) * site["gain"]
    return moved / np.sqrt(size**2 + site["eps"]) + site["bias"]


def caught(model: nn.Module, batch: dict, path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What enters and leaves a module, by a hook of the test's own."""
    seen = []
    module = model.get_submodule(path)
    handle = module.register_forward_hook(lambda _module, args, output: seen.append((args[0], output)))
    with torch.no_grad():
        model(**batch)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_the_embedded_numbers_give_what_the_modules_return(demo_directories: dict[str, Path], name: str) -> None:
    loaded = load_model(str(demo_directories[name]))
    model = loaded.model.double()
    batch = {"input_ids": torch.randint(0, 200, (2, 60))}
    (shown,) = explore_models([activations(model, batch)]).data["models"]
    *sites, whole = shown["sites"]
    assert len(sites) == 13
    assert (whole["path"], whole["layer"]) == ("all layers", -1)
    for site in sites:
        x, y = (rows.flatten(0, 1) for rows in caught(model, batch, site["path"]))
        kept = torch.linspace(0, 119, site["count"], dtype=torch.float64).round().long()
        basis = principal_basis(x[kept]).rows
        np.testing.assert_allclose(
            numbers(site)[:, :3], x[kept] @ basis.T, rtol=0, atol=2**-24 * float(x.norm(dim=1).max())
        )
        lengths = np.linalg.norm(numbers(site)[:, :4], axis=1)
        np.testing.assert_allclose(lengths, x[kept].norm(dim=1), rtol=4 * 2**-24)
        # What is rounded to float32 is as long as x or g x; what is compared is up to |g| sqrt(n) long.
        close = 16 * 2**-24 * 8 * max(1.0, float(model.get_submodule(site["path"]).weight.detach().abs().max()))
        np.testing.assert_allclose(returned(site), y[kept] @ basis.T, rtol=0, atol=close)


def test_all_layers_share_one_basis(demo_directories: dict[str, Path]) -> None:
    loaded = load_model(str(demo_directories["layernorm"]))
    gathered = activations(loaded.model, {"input_ids": torch.randint(0, 200, (2, 60))})
    leading = [site for site in gathered.sites if site.leads]
    assert [site.path for site in leading] == [
        *(f"transformer.h.{layer}.ln_1" for layer in range(6)),
        "transformer.ln_f",
    ]
    whole = explore_models([gathered]).data["models"][0]["sites"][-1]
    each = whole["count"] // 7
    assert whole["layers"] == [layer for layer in range(7) for _ in range(each)]
    rows = torch.cat([site.rows[torch.linspace(0, 119, each).round().long()] for site in leading])
    basis = principal_basis(rows)
    assert whole["explained"] == list(basis.explained)
    np.testing.assert_allclose(numbers(whole)[:, :3], rows @ basis.rows.T, atol=1e-5)
    # Without a gain, times the gain is no change: scaled coordinates are those of the centred row.
    np.testing.assert_allclose(numbers(whole)[:, 4:], numbers(whole)[:, :3] * [0, 1, 1], atol=1e-5)
    assert whole["gain"] == pytest.approx([8.0, 0, 0])
    assert whole["bias"] == [0.0, 0.0, 0.0]
    assert whole["square"] == pytest.approx([1, 0, 0, 1, 0, 1])


class Small(nn.Module):
    """An embedding and a norm: what enters the norm tells the token."""

    def __init__(self, norm: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.norm = norm

    def forward(self, input_ids: torch.Tensor, **_rest: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embedding(input_ids))


def small() -> Small:
    return Small(nn.LayerNorm(4))


def ids_of(model: Small, rows: torch.Tensor) -> list[int]:
    """Which tokens were embedded as these rows."""
    return torch.cdist(rows.float(), model.embedding.weight).argmin(1).tolist()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("portions", [[1000], [10] * 100, [1, 700, 3, 250, 46]])
def test_tokens_are_spread_evenly_over_the_text_whatever_the_batches(portions: list[int]) -> None:
    model = small()
    batches = ({"input_ids": part[None]} for part in torch.arange(1000).split(portions))
    gathered = activations(model, batches, points=100, decode=lambda token: f"<{token}>")
    (site,) = gathered.sites
    tokens = ids_of(model, site.rows)
    assert (gathered.counted, len(tokens)) == (1000, 100)
    assert [gathered.tokens[index] for index in site.tokens] == [f"<{token}>" for token in tokens]
    steps = np.diff(tokens)
    assert tokens[0] == 0
    assert tokens[-1] >= 1000 - 16
    assert steps.min() >= 8
    assert steps.max() <= 16


def test_padding_is_left_out_and_tokens_without_ids_are_numbered_through_the_text() -> None:
    model = small()
    ids = torch.arange(12).reshape(2, 6)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]])
    gathered = activations(model, {"input_ids": ids, "attention_mask": mask})
    assert gathered.tokens == ("0", "1", "2", "7", "8", "9", "10", "11")
    assert ids_of(model, gathered.sites[0].rows) == [0, 1, 2, 7, 8, 9, 10, 11]
    batches = [{"input": torch.randn(2, 2, 6)}, {"input": torch.randn(1, 3, 6)}]
    told: list[tuple[str, int, int]] = []
    gathered = activations(
        nn.Sequential(nn.LayerNorm(6)), batches, decode=lambda token: f"<{token}>", progress=lambda *at: told.append(at)
    )
    assert gathered.tokens == ("1", "2", "3", "4", "5", "6", "7")
    assert told == [("norms", 0, 0), ("text", 0, 0), ("text", 1, 0)]


def test_no_more_is_kept_than_was_asked_for() -> None:
    model = small()
    most = []
    model.norm.register_forward_hook(lambda _module, args, _output: most.append(args[0].numel() // 4))
    gathered = activations(model, ({"input_ids": torch.randint(0, 1000, (4, 50))} for _ in range(20)), points=7)
    assert sum(most) > 4000
    assert gathered.sites[0].rows.shape == (7, 4)


def test_the_first_head_stands_for_a_token() -> None:
    config = Qwen3Config(
        vocab_size=100, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    batch = {"input_ids": torch.randint(0, 100, (2, 9))}
    sites = {site.path: site for site in activations(model, batch).sites}
    site = sites["model.layers.1.self_attn.q_norm"]
    x, _ = caught(model, batch, site.path)
    torch.testing.assert_close(site.rows.float(), x.reshape(2, 9, 4, 8)[:, :, 0].flatten(0, 1))
    assert (site.layer, site.leads) == (1, False)
    assert [path for path, site in sites.items() if site.leads] == [
        "model.layers.0.input_layernorm",
        "model.layers.1.input_layernorm",
        "model.norm",
    ]


def test_a_decoders_norms_bear_the_decoders_tokens() -> None:
    config = T5Config(vocab_size=100, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    ids = torch.arange(40, 60).reshape(2, 10)
    batch = {"input_ids": ids, "decoder_input_ids": ids.roll(1, dims=1), "attention_mask": torch.ones_like(ids)}
    gathered = activations(model, batch)
    for site in gathered.sites:
        expected = batch["decoder_input_ids" if site.path.startswith("decoder") else "input_ids"]
        assert [int(gathered.tokens[index]) for index in site.tokens] == expected.flatten().tolist()
    assert {site.path.split(".")[0] for site in gathered.sites} == {"encoder", "decoder"}
    x, _ = caught(model, batch, "decoder.block.1.layer.0.layer_norm")
    (site,) = [site for site in gathered.sites if site.path == "decoder.block.1.layer.0.layer_norm"]
    torch.testing.assert_close(site.rows.float(), x.flatten(0, 1))


def test_of_a_shared_norm_the_first_call_counts() -> None:
    config = AlbertConfig(
        vocab_size=100, embedding_size=8, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    model = AlbertModel(config).eval()
    batch = {"input_ids": torch.randint(0, 100, (1, 9))}
    (site,) = [site for site in activations(model, batch).sites if site.path.endswith("full_layer_layer_norm")]
    torch.testing.assert_close(site.rows.float(), caught(model, batch, site.path)[0][0])


class Calls(nn.Module):
    """Norms as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(6))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(F.layer_norm(input, (6,), self.gain) + 1, (6,), eps=1e-3)


def test_norms_that_are_functions_are_found_too() -> None:
    model, x = Calls(), torch.randn(2, 5, 6)
    first, second = activations(model, {"input": x}).sites
    assert (first.path, second.path) == (":layer_norm", ":rms_norm")
    torch.testing.assert_close(first.rows.float(), x.flatten(0, 1))
    torch.testing.assert_close(second.rows.float(), F.layer_norm(x, (6,), model.gain).flatten(0, 1) + 1)
    assert torch.equal(first.gain.float(), model.gain)
    assert second.gain is None


def test_the_model_is_left_as_it_was_and_gives_the_same_again() -> None:
    model = small().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = (activations(model, {"input_ids": torch.arange(9)[None]}) for _ in range(2))
    assert explore_models([first]).data == explore_models([second]).data
    assert model.training
    assert not model.norm._forward_hooks
    assert not model.norm._forward_pre_hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# What is left out.


BESSEL = "it gives rows the length sqrt(n - 1), and the page draws sqrt(n), or 1 without centring"


class Bessel(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5)


class Clamped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=-1, eps=1e-6)


@pytest.mark.parametrize(
    ("norm", "reason"), [(Bessel(), BESSEL), (Clamped(), "its eps is a clamp")], ids=["bessel", "clamp"]
)
def test_a_norm_that_cannot_be_drawn_is_named_with_the_reason(norm: nn.Module, reason: str) -> None:
    model = nn.Sequential(nn.LayerNorm(8), norm)
    gathered = activations(model, {"input": torch.randn(4, 20, 8)})
    assert [site.path for site in gathered.sites] == ["0"]
    assert gathered.notes == (f"1 is left out: {reason}.",)
    with pytest.raises(InputError, match=re.escape(f"the page can draw: norm is left out: {reason}")):
        activations(Small(norm, 8), {"input_ids": torch.arange(40).reshape(2, 20)})


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * F.silu(gate)


class WithGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gated = nn.LayerNorm(8), Gated()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.gated(self.norm(input), input)


def test_a_gated_norm_is_left_out() -> None:
    gathered = activations(WithGate(), {"input": torch.randn(4, 16, 8)})
    assert [site.path for site in gathered.sites] == ["norm"]
    (note,) = gathered.notes
    assert note.startswith("gated is left out: Gated: gated")


def test_a_norm_whose_rows_are_no_tokens_is_left_out() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm, self.pooled = nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8)

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self.pooled(self.norm(self.inner(input))[:, :3])

    gathered = activations(Pooled(), {"input": torch.randn(2, 20, 8)})
    assert [site.path for site in gathered.sites] == ["norm"]
    assert gathered.notes == ("pooled is left out: its rows are not those of single tokens.",)


def test_tokens_that_are_not_finite_are_left_out_and_counted() -> None:
    model = small()
    with torch.no_grad():
        model.embedding.weight[[3, 5]] = torch.tensor([torch.nan, torch.inf])[:, None]
    gathered = activations(model, {"input_ids": torch.arange(8)[None]})
    assert gathered.notes == ("2 of 8 tokens hold NaN or infinity as they enter norm, and are not shown there.",)
    assert [gathered.tokens[index] for index in gathered.sites[0].tokens] == ["0", "1", "2", "4", "6", "7"]


def test_a_gain_that_is_not_finite_is_named() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    batch = {"input": torch.randn(4, 20, 8)}
    with torch.no_grad():
        model[1].weight[2] = torch.inf
    gathered = activations(model, batch)
    assert [site.path for site in gathered.sites] == ["0"]
    assert "1 is left out" in gathered.notes[0]


def test_norms_left_out_for_one_reason_share_a_note() -> None:
    model = nn.Sequential(nn.LayerNorm(8), *(Bessel() for _ in range(5)))
    gathered = activations(model, {"input": torch.randn(1, 9, 8)})
    assert gathered.notes == (f"1, 2, 3 and 2 more are left out: {BESSEL}.",)


def test_of_many_norms_some_are_shown_and_that_is_told() -> None:
    model = nn.Sequential(*(nn.LayerNorm(4) for _ in range(60)))
    gathered = activations(model, {"input": torch.randn(1, 100, 4)}, name="deep")
    assert len(gathered.sites) == 48
    assert (gathered.sites[0].path, gathered.sites[-1].path) == ("0", "59")
    assert gathered.notes == ("48 of 60 norms are shown, spread evenly over the depth of deep.",)
    assert all(len(site.rows) == 2000 // 48 for site in gathered.sites)


def test_norms_can_be_chosen() -> None:
    model = nn.Sequential(*(nn.LayerNorm(4) for _ in range(3)))
    gathered = activations(model, {"input": torch.randn(1, 9, 4)}, site="[12]")
    assert [site.path for site in gathered.sites] == ["1", "2"]
    with pytest.raises(InputError, match="Sequential has no norm at '7'; there are 0, 1, 2"):
        activations(model, {"input": torch.randn(1, 9, 4)}, site="7")


def test_a_model_without_norms_and_no_batch() -> None:
    with pytest.raises(InputError, match="Linear has no norms: there is nothing to draw"):
        activations(nn.Linear(4, 4), {"input": torch.randn(1, 9, 4)})
    with pytest.raises(InputError, match="at least one batch"):
        activations(nn.LayerNorm(4), [])
