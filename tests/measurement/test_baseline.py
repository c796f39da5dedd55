"""Intent files: inferred, written, read, held to; and one line for every file that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import normkit as nk
import planted_faults as faults
from normkit.errors import InputError
from normkit.inspection.result import Inspection, infer
from normkit.measurement import baseline
from normkit.measurement.baseline import Baseline
from normkit.measurement.intent import stock_intent


class Own(nn.Module):
    """A model that no library knows."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32, eps=eps), nn.Linear(32, 32)) for _ in range(3))
        self.norm = nn.LayerNorm(32, eps=eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, bos_token_id=1, eos_token_id=2, **sizes)).eval()


def inspected(model: nn.Module, intent: Baseline | Path | str | None = None) -> Inspection:
    ids = torch.randint(0, 50, (2, 24), generator=torch.Generator().manual_seed(0))
    return nk.inspect(model.eval(), {"input_ids": ids}, intent=intent)


def rules_of(inspection: Inspection) -> list[str]:
    return [found.rule for found in inspection.findings]


@pytest.fixture(scope="module")
def inferred() -> Baseline:
    return infer(inspected(Own()), source="intent.json")


@pytest.mark.slow
def test_what_is_inferred(inferred: Baseline) -> None:
    assert list(inferred.norms) == ["blocks.0.0", "blocks.1.0", "blocks.2.0", "norm"]
    first = inferred.norms["blocks.0.0"]
    assert (first.features, first.calls, first.dtype, first.output_dtype) == (32, 1, "float32", "float32")
    assert first.spec.eps == 1e-5
    assert inferred.others == ()


@pytest.mark.slow
def test_what_the_config_says_is_what_is_meant() -> None:
    broken = faults.wrong_eps(gpt2())
    inspection, intent = inspected(broken), stock_intent(broken)
    assert {site.spec.eps for site in inspection.sites} != {1e-5}
    declared = infer(inspection, intent, source="intent.json")
    assert {norm.spec.eps for norm in declared.norms.values()} == {1e-5}
    # So a fault of the first run is one of the second.
    assert rules_of(inspection) == rules_of(inspected(broken, declared)) == ["A1"]


@pytest.mark.slow
def test_a_first_run_writes_and_later_runs_are_held_to_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "intent.json"
    assert rules_of(inspected(Own(), path)) == []
    written = path.read_bytes()
    assert rules_of(inspected(Own(), path)) == []
    held = inspected(Own(eps=1e-3), str(path))
    assert rules_of(held) == ["A1"]
    assert len(held.findings[0].sites) == 4
    assert path.read_bytes() == written


@pytest.mark.slow
def test_a_config_that_drifts_from_the_declaration_is_found() -> None:
    model = gpt2()
    declared = infer(inspected(model), stock_intent(model))
    model.config.layer_norm_epsilon = 5e-5
    drifted = GPT2LMHeadModel(model.config)
    drifted.load_state_dict(model.state_dict())
    assert "A1" not in rules_of(inspected(drifted))
    assert "A1" in rules_of(inspected(drifted, declared))


def test_a_first_run_that_raises_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no norm at 'nowhere'"):
        nk.inspect(Own(), {"input_ids": torch.ones(1, 4, dtype=torch.long)}, site="nowhere", intent=tmp_path / "i.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_file_comes_back_as_it_was_written(inferred: Baseline, tmp_path: Path) -> None:
    norms = {**inferred.norms, "norm": replace(inferred.norms["norm"], factor=0.5)}
    rich = replace(inferred, norms=norms, others=("bn",), final_norm=None, source="a.json")
    path = baseline.write(rich, tmp_path / "a.json")
    assert baseline.read(path) == rich
    assert baseline.write(baseline.read(path), tmp_path / "b.json").read_bytes() == path.read_bytes()
    assert baseline.declared(path) == baseline.declared(str(path)) == (rich, None)
    assert baseline.declared(tmp_path / "none") == (None, tmp_path / "none")
    assert baseline.declared(None) == (None, None)
    assert baseline.declared(rich) == (rich, None)


@pytest.mark.slow
def test_an_older_file_without_factors_and_values_is_read(inferred: Baseline, tmp_path: Path) -> None:
    document = inferred.to_json()
    for norm in document["norms"].values():
        for name in ("factor", "gain", "bias"):
            del norm[name]
    (tmp_path / "intent.json").write_text(json.dumps(document))
    norms = {path: replace(norm, gain=None, bias=None) for path, norm in inferred.norms.items()}
    assert baseline.read(tmp_path / "intent.json") == replace(inferred, norms=norms)


def test_the_baseline_of_another_model_is_refused(inferred: Baseline) -> None:
    with pytest.raises(InputError, match=r"intent.json declares 4 norms such as blocks.0.0, and this model has none"):
        inspected(gpt2(), inferred)


def test_a_folder_that_cannot_be_written(inferred: Baseline, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write .*; give another path for the intent file$"):
        baseline.write(inferred, tmp_path / "file" / "intent.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found no JSON"),
        (b"\xff\xfe", "found no JSON"),
        (b"[" * 100_000, "found no JSON"),
        (b"[]", "found other JSON"),
        (b'{"schema_version": 1, "sites": {}}', "found other JSON"),
        (b'{"content": "normkit intent", "schema_version": 2}', "expected schema_version 1 .* got 2; update normkit"),
        (b'{"content": "normkit intent", "schema_version": 1}', '"placements" is missing'),
    ],
)
def test_other_files_are_refused_on_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "intent.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as raised:
        baseline.read(path)
    assert "intent.json" in str(raised.value)
    assert "\n" not in str(raised.value)


def put(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (put("norms", value=[]), r'"norms" must be an object, got \[\]'),
        (put("norms", "norm", value=3), "norm must be an object, got 3"),
        (put("norms", "norm", "features", value=0), '"features" of norm must be at least 1, got 0'),
        (put("norms", "norm", "calls", value=True), '"calls" of norm must be a whole number, got True'),
        (put("norms", "norm", "factor", value=0), '"factor" of norm must be a finite number other than 0, got 0'),
        (
            put("norms", "norm", "factor", value="one"),
            "\"factor\" of norm must be a finite number other than 0, got 'one'",
        ),
        (put("norms", "norm", "gain", value=[1.0]), r'"gain" of norm must be an object or null, got \[1.0\]'),
        (put("norms", "norm", "gain", "median", value="1"), '"median" of the gain of norm must be a finite number'),
        (put("norms", "norm", "bias", "digest", value=7), '"digest" of the bias of norm must be a text, got 7'),
        (put("norms", "norm", "role", value="prae"), '"role" of norm must be one of pre, post'),
        (put("norms", "norm", "spec", "eps_placement", value="below"), '"spec" of norm: '),
        (put("norms", "norm", "spec", "eps", value="small"), '"spec" of norm: '),
        (put("norms", "norm", "spec", "epsilon", value=1e-5), "a NormSpec has no 'epsilon'"),
        (put("placements", "blocks.0", value="prae"), '"placements" of blocks.0 must be one of pre, post'),
        (put("final_norm", value=4), '"final_norm" must be a path or null, got 4'),
        (put("others", value=[4]), r'"others" must be paths, got \[4\]'),
    ],
)
def test_damage_is_named(
    inferred: Baseline, tmp_path: Path, damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    document = json.loads(json.dumps(inferred.to_json()))
    damage(document)
    path = tmp_path / "intent.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=message) as raised:
        baseline.read(path)
    assert str(raised.value).startswith(f"the intent file {path} is damaged: ")
    assert str(raised.value).endswith("; mend it, or have it written anew")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*Is a directory; `normkit inspect MODEL --intent FILE` writes"):
        baseline.read(tmp_path)
