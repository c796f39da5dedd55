"""The film as a file: so many frames, the same bytes twice, chapters that fade, words over the scene."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from normkit.plots import film, storyboard
from normkit.show import theme
from normkit.show.animation import picture_of


@pytest.fixture
def short(monkeypatch):
    """The last shot of the second chapter and the first of the third, each of eight frames."""
    monkeypatch.setattr(film, "storyboard", lambda figure: storyboard.storyboard(figure)[6:8])
    monkeypatch.setattr(film, "_spans", lambda _: [(0.1 * k, 0.1 * k + 0.09) for k in range(4)])
    monkeypatch.setattr(storyboard.Shot, "seconds", 0.4)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_frames_fade_from_chapter_to_chapter_and_nothing_is_drawn_twice(monkeypatch, scheme):
    told, drawn = [], []
    paper = np.array(list(bytes.fromhex(theme.PALETTES[scheme]["paper"][1:])))
    monkeypatch.setattr(film, "draw", lambda *known, kept=film.draw: (drawn.append(known[2:]), kept(*known)))
    with theme.style(scheme):
        frames = [np.asarray(frame).astype(int) for frame in film._pictures(lambda *said: told.append(said))]
        figure = film.new_figure()
        shots = film.storyboard(figure)
        film.write(figure, shots, 1)
        words = np.asarray(picture_of(figure)).astype(int)
    assert told == [("frames", done, 16) for done in range(16)]
    assert len(drawn) == len(set(drawn)) < 16
    # A seventh of the first frame of the next chapter, over the last of the one before it.
    assert 0 < np.abs(frames[8] - frames[7]).max() <= 255 / 7 + 1
    is_word = np.abs(words - paper).sum(-1) > 300
    assert (frames[15][is_word] == words[is_word]).all()
    assert np.abs(frames[15] - words).max() > 100


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_a_second_film_has_the_same_bytes(monkeypatch):
    monkeypatch.setattr(storyboard.Shot, "seconds", 0.2)
    gif, mp4 = film.film("light", lambda *_: None, has_mp4=True)
    assert film.film("light", lambda *_: None, has_mp4=True) == (gif, mp4)
    image = Image.open(io.BytesIO(gif))
    seconds = 0.0
    for frame in range(image.n_frames):
        image.seek(frame)
        seconds += image.info["duration"] / 1000
    assert (image.size, seconds) == (film.GIF_SIZE, pytest.approx(0.4))
    assert mp4[4:8] == b"ftyp"


@pytest.mark.slow
def test_the_poster_has_a_frame_of_each_chapter():
    picture = Image.open(io.BytesIO(film.poster("light")))
    assert picture.size == film.SIZE
    tiles = [
        picture.convert("RGB").crop((640 * k, 360 * m, 640 * k + 640, 360 * m + 360)) for m in (0, 1) for k in (0, 1)
    ]
    assert len({tile.tobytes() for tile in tiles}) == 4


@pytest.mark.exhaustive
@pytest.mark.slow
def test_as_it_is_it_can_be_sent():
    gif, mp4 = film.film("light", lambda *_: None, has_mp4=True)
    assert max(len(gif), len(mp4)) < 8_000_000
    assert film.film("light", lambda *_: None, has_mp4=False) == (gif, None)
