"""The atlas: sinks are found where they were planted, and a model gets its page from what was measured of it."""

from __future__ import annotations

import pytest
import torch

import atlas
from atlas_questions import QUESTIONS
from normkit import demo


def test_a_sink_is_the_token_that_later_ones_look_at():
    weights = torch.eye(20, dtype=torch.float64) * 0.25
    weights[:, 3] += 0.5
    weights[:, 19] += 0.25
    found = atlas.sink(7, weights, [str(place) for place in range(20)])
    assert (found.block, found.token) == (7, "3")
    assert found.share == pytest.approx(0.5)


def test_tokens_that_few_may_see_are_no_sink():
    weights = torch.zeros(20, 20)
    weights[19, 18] = 1.0
    weights[:, 0] += 0.25
    assert atlas.sink(0, weights, ["first", *["other"] * 19]).token == "first"


@pytest.mark.exhaustive
def test_the_demo_has_a_page(tmp_path, monkeypatch, capsys):
    folder = demo.directory("layernorm")
    monkeypatch.setattr("sys.argv", ["atlas.py", f"demo={folder}", "--out", str(tmp_path)])
    assert atlas.main() == 0
    assert capsys.readouterr().out == "demo no finding\n"
    page = (tmp_path / "demo.md").read_text()
    assert "13 norms (LayerNorm)" in page
    assert all(f"**{question.question}** " in page for question in QUESTIONS)
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "demo.svg",
        *(f"{question.key}.svg" for question in QUESTIONS),
    }
    index = (tmp_path / "index.md").read_text()
    assert index.count("| demo | ") == len(QUESTIONS) + 1
