"""The picture of a report at the head of the README says what the report says today."""

from __future__ import annotations

import re

import pytest

import report_picture

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


def numbers(words):
    return [float(number.replace(",", "")) for number in NUMBER.findall(words)]


@pytest.mark.slow
def test_the_pictures_show_the_report_of_today(tmp_path):
    today = report_picture.words(report_picture.faulty(tmp_path))
    for picture in report_picture.PICTURES.values():
        shown = report_picture.shown(picture)
        assert NUMBER.sub("#", shown) == NUMBER.sub("#", today), f"run python census/report_picture.py: {picture.name}"
        # Another CPU adds in another order: the last digit that is shown may differ.
        assert numbers(shown) == pytest.approx(numbers(today), rel=1e-2)
