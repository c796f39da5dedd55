import io
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from normkit.errors import InputError
from normkit.show import animation
from normkit.show.animation import eased, timeline

PAPER, INK, COLOURS = "#ffffff", "#1b1e22", ["#0072b2", "#d55e00"]


def pictures(count, size=(32, 16)):
    for k in range(count):
        picture = Image.new("RGB", size, PAPER)
        picture.paste(COLOURS[k % 2], (2 * k, 2, 2 * k + 8, 10))
        yield picture


@pytest.mark.parametrize(("name", "kind"), [("a.gif", "gif"), ("b.MP4", "mp4"), ("c.tar.Gif", "gif")])
def test_the_name_says_the_format(name, kind):
    assert animation.clip_of(Path(name)) == kind


@pytest.mark.parametrize("name", ["a.png", "a", "gif", "a.mp4.txt", ".gif"])
def test_other_names_are_refused(name):
    with pytest.raises(InputError, match=r"a file \.gif or \.mp4, got '"):
        animation.clip_of(Path(name))


def test_a_gif_has_its_frames_time_and_exact_colours_and_plays_for_ever():
    image = Image.open(io.BytesIO(animation.gif(pictures(5), PAPER, INK, COLOURS, 8)))
    assert (image.n_frames, image.size, image.info["loop"]) == (5, (32, 16), 0)
    for k in range(5):
        image.seek(k)
        assert image.info["duration"] == 80
        shown = image.convert("RGB")
        assert shown.getpixel((2 * k + 4, 5)) == tuple(bytes.fromhex(COLOURS[k % 2][1:]))
        assert shown.getpixel((31, 15)) == (255, 255, 255)


def test_a_gif_repeats():
    assert animation.gif(pictures(3), PAPER, INK, COLOURS, 5) == animation.gif(pictures(3), PAPER, INK, COLOURS, 5)


def test_the_ffmpeg_of_the_system_comes_first(monkeypatch):
    monkeypatch.setattr(shutil, "which", {"ffmpeg": "/somewhere/ffmpeg"}.get)
    assert animation.ffmpeg() == "/somewhere/ffmpeg"


@pytest.mark.slow
def test_the_package_has_one_where_the_system_has_none(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "ffmpeg" in Path(animation.ffmpeg()).name


def test_without_ffmpeg_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(InputError, match=r'pip install "normkit\[video\]"'):
        animation.ffmpeg()


def test_what_ffmpeg_says_is_passed_on(monkeypatch, tmp_path):
    program = tmp_path / "ffmpeg"
    program.write_text("#!/bin/sh\nexec 0<&-\necho no such codec >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(program))
    with pytest.raises(InputError, match=r"could not write MP4: no such codec; name the file \.gif"):
        animation.mp4(pictures(40, (640, 580)), 20)


@pytest.fixture(scope="module")
def moments():
    return timeline(5, 500)


def test_the_moments_go_through_every_stage_rest_there_and_never_jump(moments):
    assert len(moments) == 500
    assert [len(timeline(3, frames)) for frames in (2, 7, 60)] == [2, 7, 60]
    ways = list(dict.fromkeys((moment.before, moment.after) for moment in moments))
    assert ways == [(0, 0), (0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]
    for stage in range(5):
        rests = [moment for moment in moments if moment.after == stage and moment.way == 1.0]
        # A rest is near a tenth of the whole.
        assert 40 < len(rests) < 60
    # As a point that each stage moves by 1 and the way back by 4; the first follows on the last.
    places = [moment.between(moment.before, moment.after) for moment in [*moments, moments[0]]]
    assert np.abs(np.diff(places)).max() < 0.2
    assert np.abs(np.diff(places[:-60])).max() < 0.05


def test_what_is_shown_comes_and_goes_without_a_jump(moments):
    shown = [moment.opacity(moment.before > 1, moment.after > 1) for moment in [*moments, moments[0]]]
    assert (min(shown), max(shown)) == (0.0, 1.0)
    assert np.abs(np.diff(shown)).max() < 0.1


def test_the_ways_are_slow_at_both_ends():
    assert [eased(way) for way in (0.0, 0.5, 1.0)] == [0.0, 0.5, 1.0]
    step = 1e-4
    assert eased(step) / step < 1e-6
    assert (1 - eased(1 - step)) / step < 1e-6
    assert (eased(0.5 + step) - eased(0.5 - step)) / (2 * step) == pytest.approx(15 / 8, rel=1e-6)


def test_turns_are_even_and_stop_short_of_the_whole(moments):
    assert [moment.turn for moment in moments] == pytest.approx(np.arange(500) / 500)
