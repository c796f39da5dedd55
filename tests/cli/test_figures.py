"""`normkit figures`: files, the page, what is printed, and one line for every bad input."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from helpers import refused
from normkit.cli import figures
from normkit.plots import film, gallery
from normkit.show import theme
from normkit.show.axes import figure_of, new_axes
from normkit.show.drawing import Drawing

Run = Callable[..., Result]

TITLES = {"two-epsilons": "One epsilon, two places", "jacobian-spectrum": "What a norm lets through"}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gallery of two figures that needs no model and draws one line each."""

    def drawn(name: str, title: str) -> Drawing:
        ax = new_axes()
        ax.plot([0, 1], color=theme.colour("accent"))
        return Drawing(name=name, figure=figure_of(ax), title=title, caption="A caption.", description="A description.")

    makers = tuple(functools.partial(drawn, *each) for each in TITLES.items())
    monkeypatch.setattr(figures, "_twin", lambda _name, _told: None)
    monkeypatch.setattr(gallery, "gallery", lambda _twins: makers)


def written(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_one_line_per_figure_where_the_page_lies_and_the_files_as_json(run: Run) -> None:
    done = run("figures")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("two-epsilons.svg       One epsilon, two places")
    assert lines[1].startswith("jacobian-spectrum.svg  What a norm lets through")
    assert lines[2:] == ["", "all on one page: normkit-out/figures/index.html"]
    assert max(map(len, lines)) <= 100
    assert list(written("normkit-out/figures")) == ["index.html", "jacobian-spectrum.svg", "two-epsilons.svg"]
    done = run("figures", "--json", "--out", "here", "--scheme", "both")
    document = json.loads(done.stdout)
    assert (done.exit_code, done.stderr) == (0, "")
    assert (document["schema_version"], document["folder"], document["index"]) == (1, "here/figures", "index.html")
    assert [figure["name"] for figure in document["figures"]] == list(TITLES)
    for figure in document["figures"]:
        assert all((Path("here/figures") / name).exists() for name in figure["files"])
        assert len(figure["files"]) == 2
        assert figure["title"]
        assert figure["caption"].endswith(".")
        assert figure["description"].endswith(".")


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("kind", "magic"),
    [
        ("svg", b"<?xml"),
        pytest.param("png", b"\x89PNG", marks=pytest.mark.slow),
        pytest.param("pdf", b"%PDF", marks=pytest.mark.slow),
    ],
)
def test_formats_and_schemes(run: Run, kind: str, magic: bytes) -> None:
    done = run("figures", "--out", "a", "--format", kind, "--scheme", "both")
    assert (done.exit_code, done.stderr) == (0, "")
    files = written("a/figures")
    assert set(files) == {"index.html", *(f"{name}{dark}.{kind}" for name in TITLES for dark in ("", "-dark"))}
    assert all(content.startswith(magic) for name, content in files.items() if name != "index.html")
    page = files["index.html"].decode()
    assert all(f'href="{name}"' in page for name in files if name != "index.html")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_the_page_of_both_schemes_is_that_of_the_light_one_with_links_to_the_dark_ones(run: Run) -> None:
    for scheme in ("light", "both", "dark"):
        assert run("figures", "--out", scheme, "--scheme", scheme).exit_code == 0
    light, both, dark = (written(f"{scheme}/figures") for scheme in ("light", "both", "dark"))
    assert list(dark) == ["index.html", "jacobian-spectrum-dark.svg", "two-epsilons-dark.svg"]
    assert b"var(--accent)" in dark["index.html"]
    assert b"#56b4e9" in dark["two-epsilons-dark.svg"]
    pages = light.pop("index.html"), both.pop("index.html")
    assert {name: content for name, content in both.items() if not name.endswith("-dark.svg")} == light
    assert re.sub(rb'<a href="[\w-]+-dark.svg">[^<]+</a> ', b"", pages[1]) == pages[0] != pages[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--format", "gif"), "'gif' is not one of 'svg', 'png', 'pdf'"),
        (("--scheme", "sepia"), "'sepia' is not one of 'light', 'dark', 'both'"),
        (("extra",), "unexpected extra argument"),
        (("--film", "--format", "svg"), "--film writes MP4 and GIF, and --format is of figures; leave one out"),
    ],
)
def test_wrong_options(run: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run("figures", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert not Path("normkit-out/figures").exists()


@pytest.mark.parametrize("has_ffmpeg", [True, False])
def test_the_film_is_three_files_a_scheme_and_without_ffmpeg_two_with_a_note(
    run: Run, monkeypatch: pytest.MonkeyPatch, has_ffmpeg: bool
) -> None:
    def drawn(scheme: str, _told: object, *, has_mp4: bool) -> tuple[bytes, bytes | None]:
        return f"GIF {scheme}".encode(), b"MP4" if has_mp4 else None

    monkeypatch.setattr(film, "film", drawn)
    monkeypatch.setattr(film, "poster", lambda _scheme: b"PNG")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if has_ffmpeg else None)
    if not has_ffmpeg:
        monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    done = run("figures", "--film", "--scheme", "both", "--json")
    endings = ("png", "gif", "mp4") if has_ffmpeg else ("png", "gif")
    names = [f"film{dark}.{ending}" for dark in ("", "-dark") for ending in endings]
    assert json.loads(done.stdout) == {"schema_version": 1, "folder": "normkit-out/figures", "film": names}
    assert ("film.gif only: MP4 needs ffmpeg" in done.stderr) is not has_ffmpeg
    assert sorted(written("normkit-out/figures")) == sorted(names)
    assert written("normkit-out/figures")["film-dark.gif"] == b"GIF dark"
    assert run("figures", "--film").stdout.splitlines() == [f"normkit-out/figures/film.{ending}" for ending in endings]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_drawn(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").touch()
    assert "file is a file; choose another folder with --out" in refused(run("figures", "--out", "file/deeper"))
    # Permissions do not bind root, who runs tests in containers.
    monkeypatch.setattr("os.access", lambda _path, _mode: False)
    assert "is read-only; choose another folder with --out" in refused(run("figures"))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_whole_command_and_a_third_of_it_again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes depend neither on the process nor on what is drawn before."""
    command = [sys.executable, "-m", "normkit", "figures", "--out", str(tmp_path / "both"), "--scheme", "both"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 100
    assert "…" not in done.stdout
    both = written(tmp_path / "both" / "figures")
    page = both.pop("index.html")
    assert len(both) == 32
    assert sum(name.endswith("-dark.svg") for name in both) == 16
    # A page to be sent by mail.
    assert len(page) < 1_000_000
    whole = gallery.gallery
    monkeypatch.setattr(gallery, "gallery", lambda twins: whole(twins)[::3])
    assert run("figures", "--out", "third").exit_code == 0
    third = written("third/figures")
    del third["index.html"]
    assert len(third) == 6
    assert all(both[name] == content for name, content in third.items())
