"""The batch norms of a model in words: head, table, page, and their number beside other norms."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from rich.console import Console
from torch import nn

from normkit.inspection.inspecting import inspect
from normkit.inspection.report.description import describe, render
from normkit.inspection.report.printing import markdown, summary
from normkit.inspection.result import Inspection

WIDTH = 80


def shown(inspection: Inspection) -> str:
    console = Console(width=WIDTH, color_system=None, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(summary(inspection))
    return capture.get()


@pytest.fixture(scope="module")
def network() -> Inspection:
    """Two batch norms of a network that has seen four batches, one with a gain of 0, and a GroupNorm."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8, eps=1e-3), nn.GroupNorm(2, 8)]
    model = nn.Sequential(*layers)
    for _ in range(4):
        model(torch.randn(8, 3, 8, 8))
    with torch.no_grad():
        model[3].weight[2] = 0
    return inspect(model.eval(), 3 * torch.randn(8, 3, 8, 8))


def test_batch_norms_are_counted_beside_other_norms(network: Inspection) -> None:
    report = describe(network)
    assert "1 norm and 2 batch norms looked at: " in report.verdict.detail
    assert [norm.path for norm in network.batch_norms] == ["1", "3"]
    assert report.fact("batch norms").startswith("2, eps 1e-5 to 0.001, momentum 0.1, 4 batches counted; the data's")
    # They are no norms that nothing identified.
    assert report.part("norms").facts == ()


def test_the_table_holds_what_was_measured(network: Inspection) -> None:
    (table,) = describe(network).part("batch-norms").tables
    first, second = ({c.key: cell for c, cell in zip(table.columns, row, strict=True)} for row in table.rows)
    assert [first[key].text for key in ("path", "channels", "eps", "batches", "dead")] == ["1", "8", "1e-5", "4", "0"]
    # Every norm has this momentum, none is in training mode, and none is flat.
    assert not {"share", "mode", "flat"} & first.keys()
    assert (second["eps"].text, second["dead"].text) == ("0.001", "1")
    assert first["change"].values == (network.batch_norms[0].change,)


@pytest.mark.parametrize("batches", [0, 3])
def test_a_network_of_batch_norms_alone_has_norms(batches: int) -> None:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(20)]
    model = nn.Sequential(*stages)
    for _ in range(batches):
        model(torch.randn(4, 4, 8, 8))
    inspection = inspect(model.eval(), torch.randn(4, 4, 8, 8), name="a network")
    report = describe(inspection)
    assert (report.verdict.tone, report.verdict.headline.partition(";")[0]) == ("good", "No fault found")
    assert report.verdict.detail.startswith("20 batch norms looked at: ")
    assert report.fact("batch norms").startswith("20, eps 1e-5, momentum 0.1")
    assert ("no statistics gathered yet" in report.fact("batch norms")) is (batches == 0)
    assert report.part("norms") is None
    text = shown(inspection)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert len(re.findall(r"^\{0-19\}\.1 +4 ", text, re.MULTILINE)) == 1
    assert "No norm" not in text
    assert "{0-19}.1 " in markdown(inspection, "normkit inspect")
    page = render(inspection)
    assert 'id="batch-norms"' in page
    assert "No norm" not in page


def test_what_is_not_known_is_said(network: Inspection) -> None:
    nan = float("nan")
    norm = dataclasses.replace(network.batch_norms[0], eps=nan, share=nan, batches=-1, is_live=True)
    report = describe(dataclasses.replace(network, sites=(), batch_norms=(norm, network.batch_norms[1])))
    (table,) = report.part("batch-norms").tables
    row = {column.key: cell.text for column, cell in zip(table.columns, table.rows[0], strict=True)}
    assert [row[key] for key in ("eps", "share", "batches", "mode")] == [
        "unknown",
        "unknown",
        "not counted",
        "training",
    ]
    assert report.fact("batch norms").startswith("2, eps 0.001, momentum 0.1, 4 batches counted; ")
    # There is no norm of rows: nothing is said of its geometry, of attention, of placement.
    assert [section.id for section in report.sections] == ["batch-norms", "depth", "checks", "method"]
