import io
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from normkit.errors import InputError
from normkit.plots import clips

PAPER, INK, COLOURS = "#ffffff", "#1b1e22", ["#0072b2", "#d55e00"]


def pictures(count, size=(32, 16)):
    for k in range(count):
        picture = Image.new("RGB", size, PAPER)
        picture.paste(COLOURS[k % 2], (2 * k, 2, 2 * k + 8, 10))
        yield picture


@pytest.mark.parametrize(("name", "kind"), [("a.gif", "gif"), ("b.MP4", "mp4"), ("c.tar.Gif", "gif")])
def test_the_name_says_the_format(name, kind):
    assert clips.clip_of(Path(name)) == kind


@pytest.mark.parametrize("name", ["a.png", "a", "gif", "a.mp4.txt", ".gif"])
def test_other_names_are_refused(name):
    with pytest.raises(InputError, match=r"a file \.gif or \.mp4, got '"):
        clips.clip_of(Path(name))


def test_a_gif_has_its_frames_time_and_exact_colours_and_plays_for_ever():
    image = Image.open(io.BytesIO(clips.gif(pictures(5), PAPER, INK, COLOURS, 8)))
    assert (image.n_frames, image.size, image.info["loop"]) == (5, (32, 16), 0)
    for k in range(5):
        image.seek(k)
        assert image.info["duration"] == 80
        shown = image.convert("RGB")
        assert shown.getpixel((2 * k + 4, 5)) == tuple(bytes.fromhex(COLOURS[k % 2][1:]))
        assert shown.getpixel((31, 15)) == (255, 255, 255)


def test_a_gif_repeats():
    assert clips.gif(pictures(3), PAPER, INK, COLOURS, 5) == clips.gif(pictures(3), PAPER, INK, COLOURS, 5)


def test_the_palette_goes_from_the_paper_to_each_colour():
    entries = clips._palette("#000000", "#ffffff", ["#ff0000"])
    colours = [tuple(entries[k : k + 3]) for k in range(0, len(entries), 3)]
    assert colours[0] == (0, 0, 0)
    assert {(255, 255, 255), (255, 0, 0)} <= set(colours)
    assert len(colours) == len(set(colours)) <= 256


def test_the_ffmpeg_of_the_system_comes_first(monkeypatch):
    monkeypatch.setattr(shutil, "which", {"ffmpeg": "/somewhere/ffmpeg"}.get)
    assert clips.ffmpeg() == "/somewhere/ffmpeg"


@pytest.mark.slow
def test_the_package_has_one_where_the_system_has_none(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "ffmpeg" in Path(clips.ffmpeg()).name


def test_without_ffmpeg_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(InputError, match=r'pip install "normkit\[video\]"'):
        clips.ffmpeg()


def test_what_ffmpeg_says_is_passed_on(monkeypatch, tmp_path):
    program = tmp_path / "ffmpeg"
    program.write_text("#!/bin/sh\nexec 0<&-\necho no such codec >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(program))
    with pytest.raises(InputError, match=r"could not write MP4: no such codec; name the file \.gif"):
        clips.mp4(pictures(40, (640, 580)), (640, 580), 20)
