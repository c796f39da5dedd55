"""The table of recorded rows: no field is wrong, and a class of each kind gives what the page says."""

from __future__ import annotations

import re

import pytest
import torch

import normkit as nk
import recorded_rows
from answers import build, judge

PAGE = recorded_rows.PAGE.read_text(encoding="utf-8")


def test_the_page_states_no_wrong_field():
    answers, wrong, without = map(int, re.search(r"(\d+) answers, (\d+) with a wrong field. (\d+)", PAGE).groups())
    assert wrong == 0
    assert without < answers / 20
    assert answers > 250


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["llama.LlamaRMSNorm", "gemma.GemmaRMSNorm", "zaya.ZayaQKNorm"])
def test_recorded_rows_of_a_class_are_read_right(name):
    definition, case, _ = next(each for each in recorded_rows.bodies() if str(each[0]) == name)
    norm = build(definition, case)
    x, y = recorded_rows.recorded(norm, case, torch.float32, "1e-4 to 10")
    weight = next((part.detach() for part in norm.parameters() if part.shape == x.shape[-1:]), None)
    outcome, remark = judge(nk.identify_rows(x, y, weight), {**case, "readings": {}})
    assert outcome != "wrong", remark
