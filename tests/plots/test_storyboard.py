"""The shots of the film: long enough to be read, nothing over anything else, and every number as torch has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from normkit.geometry.centring import helmert
from normkit.geometry.space_figures import upright
from normkit.plots.film import SIZE, draw, new_figure, write
from normkit.plots.gallery import cloud
from normkit.plots.storyboard import CHAPTERS, storyboard
from normkit.show import theme
from normkit.show.animation import picture_of


@pytest.fixture(scope="module")
def film():
    with theme.style():
        figure = new_figure()
        yield figure, storyboard(figure)


def test_a_minute_of_four_chapters_that_can_be_read_at_three_words_a_second(film):
    _, shots = film
    assert 55 < sum(shot.seconds for shot in shots) < 70
    assert sorted({shot.chapter for shot in shots}) == list(range(len(CHAPTERS)))
    for shot in shots:
        assert len(f"{shot.title} {shot.caption}".split()) / shot.seconds < 3
        assert shot.caption.endswith(".")
        assert shot.measured
        # What moves is at rest before the end, so that its end is seen.
        assert shot.is_turning or shot.way(0.0) == 0.0 < shot.way(0.3) < shot.way(0.7) == shot.way(1.0) == 1.0


@pytest.mark.slow
def test_words_do_not_overlap_nor_leave_the_picture(film):
    figure, shots = film
    for place, shot in enumerate(shots):
        write(figure, shots, place)
        picture_of(figure)
        boxes = [text.get_window_extent() for text in figure.texts if text.get_text()]
        assert len(boxes) == 3 + len(CHAPTERS) + bool(shot.formula)
        for k, box in enumerate(boxes):
            assert 0 <= box.x0 < box.x1 <= SIZE[0], shot.title
            assert 0 <= box.y0 < box.y1 <= SIZE[1], shot.title
            assert not any(box.overlaps(other) for other in boxes[k + 1 :]), shot.title
        # The caption is at least 26 dots high a line: it can be read at this size.
        assert min(text.get_fontsize() for text in figure.texts) * 150 / 72 > 16


@pytest.mark.slow
def test_the_scene_stays_off_the_words_and_its_points_within_the_picture(film):
    figure, shots = film
    for place, shot in enumerate(shots):
        for way in (0.0, 0.5, 1.0):
            draw(figure, shots, place, way)
            shown = [
                (ax, part.get_offsets())
                for ax in figure.axes
                for part in ax.collections
                if part.get_label() == "points"
            ]
            assert sum(len(offsets) for _, offsets in shown) == (66 if shot.chapter == 1 else 33)
            for ax, offsets in shown:
                places = ax.transData.transform(np.asarray(offsets))
                box = ax.get_window_extent()
                assert (places >= (box.x0, box.y0)).all(), shot.title
                assert (places <= (box.x1, box.y1)).all(), shot.title


def test_the_numbers_are_those_of_torch(film):
    told = {shot.title: shot.measured for shot in film[1]}
    ones = upright()[:, 2]
    raw = cloud("clusters") @ upright().T
    batch, layer = raw - raw.mean(0), raw - raw.mean(-1, keepdim=True)
    thick = [float((points @ ones).std(correction=0)) for points in (raw, batch, layer)]
    words = "standard deviation along all-ones: before {:.2f}, BatchNorm {:.2f}, LayerNorm {:.2f}"
    assert told["Seen along the plane"] == words.format(*thick)
    # A third of the points moves by (2, -1, -1), the mean by a third of that.
    assert f"BatchNorm {6**0.5 / 3:.2f}, LayerNorm 0" in told["Pull one cluster away"]
    gain = torch.tensor([0.9, 1.5, 0.6, 1.0], dtype=torch.float64)
    sizes = 2 * torch.linalg.svdvals(gain.diag() @ helmert(4))
    assert told["Gain: an ellipsoid"] == f"semi-axes: {', '.join(f'{size:.2f}' for size in sizes)}"
    assert told["RMSNorm: gain"] == f"semi-axes √3 |w|: {', '.join(f'{3**0.5 * g:.2f}' for g in (1.35, 1, 0.65))}"
    assert told["Scaled: a true sphere"] == "length of every point: 2.0000; dimension 2"
    assert told["3  Gain and bias"].endswith("around b = (0.3, 0.1, 0.9)")
    assert "norm = √3" in told["2  Scale"]
