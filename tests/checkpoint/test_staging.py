from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from normkit.checkpoint.staging import JOURNAL, FinishedFile, Staging
from normkit.errors import InputError

IDENTITY = {"plan": "a", "source": {"model.safetensors": [8, 1]}}


@pytest.fixture
def destination(tmp_path: Path) -> Path:
    return tmp_path / "out"


def partial(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.normkit-partial")


def finished(name: str = "model.safetensors", content: bytes = b"weights") -> FinishedFile:
    return FinishedFile(name=name, source_sha256="s", sha256="h", size=len(content), residuals={"bias": 0.1 + 0.2})


def keep(staging: Staging, name: str = "model.safetensors", content: bytes = b"weights") -> None:
    staging.part(name).write_bytes(content)
    staging.keep(finished(name, content))


def use(destination: Path, action: Callable[[Staging], object]) -> None:
    with Staging(destination) as staging:
        staging.begin(IDENTITY)
        action(staging)


def interrupted(destination: Path, *names: str) -> Path:
    """What a process leaves that was killed after so many files."""
    staging = Staging(destination)
    staging.begin(IDENTITY)
    for name in names:
        keep(staging, name)
    staging.part("torn.safetensors").write_bytes(b"we")
    staging.close()
    return partial(destination)


def test_the_destination_appears_at_the_end_and_holds_what_was_written(destination, tmp_path):
    (tmp_path / "card.md").write_text("card")
    with Staging(destination) as staging:
        assert staging.begin(IDENTITY) == {}
        keep(staging)
        staging.write("config.json", b"{}")
        staging.write("1_Pooling/config.json", b"{1}")
        staging.copy(tmp_path / "card.md", "more/card.md")
        assert not destination.exists()
        assert staging.finish() == destination
    assert {str(path.relative_to(destination)): path.read_bytes() for path in destination.rglob("*.*")} == {
        "model.safetensors": b"weights",
        "config.json": b"{}",
        "1_Pooling/config.json": b"{1}",
        "more/card.md": b"card",
    }
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_folders_above_are_made_and_there_may_be_nothing_to_resume(tmp_path, destination):
    with Staging(tmp_path / "a" / "b" / "out") as staging:
        staging.begin(IDENTITY)
        staging.finish()
    assert (tmp_path / "a" / "b" / "out").is_dir()
    with Staging(destination, resume=True) as staging:
        assert staging.begin(IDENTITY) == {}
        staging.finish()
    assert destination.is_dir()


@pytest.mark.parametrize("kind", ["folder", "file", "broken link"])
def test_what_exists_is_left_alone(destination, kind):
    match kind:
        case "folder":
            destination.mkdir()
        case "file":
            destination.write_text("mine")
        case _:
            destination.symlink_to("nowhere")
    with pytest.raises(InputError) as error:
        Staging(destination)
    assert str(error.value) == (
        f"expected a new folder to write to, {destination} exists; choose another name, or delete it"
    )
    assert [path.name for path in destination.parent.iterdir()] == ["out"]


def test_the_source_is_not_written_to(tmp_path):
    source, link = tmp_path / "model", tmp_path / "link"
    source.mkdir()
    link.symlink_to(source)
    for inside in (source / "out", source / "deep" / "out", link / "out", tmp_path / "x" / ".." / "model" / "out"):
        with pytest.raises(InputError, match=r"out is inside .*model, which is only read; choose a folder outside it"):
            Staging(inside, source=source)
    assert list(source.iterdir()) == []
    Staging(tmp_path / "model-out", source=source).close()


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path):
    # Root may write anywhere but as somebody else.
    program = """
import os, sys
from pathlib import Path
from normkit.checkpoint.staging import Staging
from normkit.errors import InputError
os.chdir(sys.argv[1])
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    Staging(Path("out"))
except InputError as error:
    sys.stdout.write(str(error))
"""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    done = subprocess.run([sys.executable, "-c", program, str(closed)], capture_output=True, text=True, check=True)
    assert done.stdout == f"cannot write to {closed}: Permission denied; choose another folder"
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write to .*file.*; choose another folder"):
        Staging(tmp_path / "file" / "out")


def test_an_interrupted_fold_is_not_overwritten_unasked(destination):
    folder = interrupted(destination, "a.safetensors")
    with pytest.raises(InputError) as error:
        Staging(destination)
    assert str(error.value) == f"an interrupted fold is in {folder}; --resume finishes it, or delete it"
    assert (folder / "a.safetensors").exists()


def test_a_resumed_fold_has_the_finished_files_and_nothing_else(destination):
    folder = interrupted(destination, "a.safetensors", "b.safetensors", "c.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "deep").mkdir()
    (folder / "deep" / "file").write_text("")
    (folder / "b.safetensors").unlink()
    (folder / "c.safetensors").write_bytes(b"short")
    with Staging(destination, resume=True) as staging:
        assert staging.begin(IDENTITY) == {"a.safetensors": finished("a.safetensors")}
        assert {path.name for path in folder.iterdir()} == {"a.safetensors", JOURNAL}
        keep(staging, "b.safetensors")
        assert list(staging.finished) == ["a.safetensors", "b.safetensors"]
        staging.finish()
    assert sorted(path.name for path in destination.iterdir()) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    ("identity", "named"),
    [
        (IDENTITY | {"plan": "b"}, "plan"),
        ({"plan": "b", "source": {"model.safetensors": [8, 2]}}, "plan and source"),
        (IDENTITY | {"new": 1}, "new"),
    ],
)
def test_another_fold_is_not_resumed(destination, identity, named):
    folder = interrupted(destination, "a.safetensors")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InputError) as error, Staging(destination, resume=True) as staging:
        staging.begin(identity)
    assert str(error.value) == f"{folder} was begun with another {named}; --resume needs the same, or delete it"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("cut", [1, 30])
def test_a_torn_journal_counts_up_to_its_last_whole_line(destination, cut):
    folder = interrupted(destination, "a.safetensors", "b.safetensors")
    journal = folder / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-cut])
    with Staging(destination, resume=True) as staging:
        assert list(staging.begin(IDENTITY)) == ["a.safetensors"]
        keep(staging, "b.safetensors")
        staging.close()
    with Staging(destination, resume=True) as staging:
        assert list(staging.begin(IDENTITY)) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("journal", [b'{"plan', b"", b"[]\n", None, "link", "pipe"])
def test_a_folder_without_a_journal_is_left_alone(destination, journal, resume):
    folder = interrupted(destination, "a.safetensors")
    (folder / JOURNAL).rename(destination.with_name("journal"))
    match journal:
        case "link":
            (folder / JOURNAL).symlink_to(destination.with_name("journal"))
        case "pipe":
            os.mkfifo(folder / JOURNAL)
        case bytes():
            (folder / JOURNAL).write_bytes(journal)
    before = sorted(folder.iterdir())
    said = "which is a folder, and not one with the journal of an interrupted fold; nothing in it was touched: move it"
    with pytest.raises(InputError, match=said):
        Staging(destination, resume=resume)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("kind", ["a link", "a link to an interrupted fold", "a link to nothing", "a file"])
def test_the_staging_folder_is_not_entered_through_a_link(destination, kind, resume):
    """`fold --resume` once deleted everything in a folder that such a link led to."""
    victim = destination.with_name("victim")
    if kind == "a link":
        victim.mkdir()
        (victim / "thesis.tex").write_text("years")
    elif kind == "a link to an interrupted fold":
        interrupted(destination, "a.safetensors").rename(victim)
    if kind == "a file":
        partial(destination).write_text("mine")
    else:
        partial(destination).symlink_to(victim)
    before = sorted(victim.parent.rglob("*"))
    with pytest.raises(InputError) as error:
        Staging(destination, resume=resume)
    assert str(error.value) == (
        f"expected to write in {partial(destination)}, which is {kind[:6]}, and not a folder of normkit's "
        "own; nothing in it was touched: move it away, or choose another DST"
    )
    assert sorted(victim.parent.rglob("*")) == before


def test_a_fold_killed_at_its_first_journal_can_be_resumed(destination):
    partial(destination).mkdir()
    (partial(destination) / f".{JOURNAL}.a1b2").write_bytes(b'{"pl')
    with Staging(destination, resume=True) as staging:
        assert staging.begin(IDENTITY) == {}
        staging.finish()
    assert list(destination.iterdir()) == []


def test_a_finished_file_that_is_a_link_by_now_is_made_anew(destination):
    folder = interrupted(destination, "a.safetensors")
    (folder / "a.safetensors").rename(destination.with_name("elsewhere"))
    (folder / "a.safetensors").symlink_to(destination.with_name("elsewhere"))
    with Staging(destination, resume=True) as staging:
        assert staging.begin(IDENTITY) == {}
    assert destination.with_name("elsewhere").read_bytes() == b"weights"


def test_a_folder_that_was_exchanged_meanwhile_does_not_become_the_destination(destination):
    def finish_late(staging: Staging) -> None:
        partial(destination).rename(destination.with_name("ours"))
        partial(destination).mkdir()
        (partial(destination) / "theirs").touch()
        staging.finish()

    with pytest.raises(InputError, match="is another folder by now"):
        use(destination, finish_late)
    assert not destination.exists()
    assert (partial(destination) / "theirs").exists()


@pytest.mark.slow
def test_two_folds_do_not_share_a_destination(destination):
    program = f"""
import sys
from collections.abc import Callable
from pathlib import Path
from normkit.checkpoint.staging import Staging
staging = Staging(Path({str(destination)!r}))
staging.begin({{}})
sys.stdout.write("begun"); sys.stdout.flush()
sys.stdin.read()
staging.finish()
"""
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.read(5) == "begun"
    for resume in (False, True):
        with pytest.raises(InputError) as error:
            Staging(destination, resume=resume)
        assert str(error.value) == (
            f"another normkit fold writes to {destination}; wait for it, or choose another folder"
        )
    other.communicate("")
    assert other.returncode == 0
    assert destination.is_dir()
    assert not partial(destination).exists()


@pytest.mark.parametrize("ending", ["with a result", "with an error"])
def test_a_fold_that_ends_while_another_begins_is_not_joined(destination, monkeypatch, ending):
    first = Staging(destination)
    first.begin(IDENTITY)

    def end_first(_handle, _operation):
        first.finish() if ending == "with a result" else first.__exit__(None, None, None)

    monkeypatch.setattr("fcntl.flock", end_first)
    with pytest.raises(InputError, match=rf"another normkit fold to {destination} has just ended"):
        Staging(destination, resume=True)
    assert not partial(destination).exists()


def test_a_fold_that_begins_after_another_has_ended_does_not_begin(destination, monkeypatch):
    first = Staging(destination)
    first.begin(IDENTITY)
    mkdir = Path.mkdir

    def end_first(path, *arguments, **choices):
        if not destination.exists():
            first.finish()
        mkdir(path, *arguments, **choices)

    # After the look whether the destination is there, before the folder is.
    monkeypatch.setattr(Path, "mkdir", end_first)
    with pytest.raises(InputError, match=rf"another normkit fold to {destination} has just ended"):
        Staging(destination)
    assert not partial(destination).exists()


def test_an_error_before_the_first_file_leaves_nothing(destination):
    def write_a_part(staging: Staging) -> None:
        staging.part("a.safetensors").write_bytes(b"we")
        raise KeyError

    with pytest.raises(KeyError):
        use(destination, write_a_part)
    assert list(destination.parent.iterdir()) == []
    with pytest.raises(KeyError), Staging(destination):
        raise KeyError
    assert list(destination.parent.iterdir()) == []


def test_an_error_after_the_first_file_keeps_it(destination):
    def keep_one(staging: Staging) -> None:
        keep(staging)
        raise KeyError

    with pytest.raises(KeyError):
        use(destination, keep_one)
    with Staging(destination, resume=True) as staging:
        assert list(staging.begin(IDENTITY)) == ["model.safetensors"]


def test_a_destination_that_appears_meanwhile_is_left_alone(destination):
    def finish_late(staging: Staging) -> None:
        keep(staging)
        destination.write_text("mine")
        staging.finish()

    with pytest.raises(InputError, match=f"cannot write {destination}: it exists by now"):
        use(destination, finish_late)
    assert destination.read_text() == "mine"
    assert (partial(destination) / "model.safetensors").exists()


def test_room_is_asked_for_before_it_is_used(destination, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=1_500_000_000))
    with pytest.raises(InputError) as error:
        use(destination, lambda staging: [staging.require_room(size) for size in (1_500_000_000, 2_250_000_000)])
    assert str(error.value) == (
        f"the fold takes 2.25 GB in {destination.parent}, where 1.50 GB are free; make room, or choose a folder on "
        "another disk"
    )
    assert not partial(destination).exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("action", ["keep", "write", "copy"])
def test_a_full_disk_is_one_line(destination, tmp_path, monkeypatch, action, code):
    def full(_handle):
        raise OSError(code, os.strerror(code))

    (tmp_path / "card.md").write_text("card")
    actions = {
        "keep": lambda staging: keep(staging, "b.safetensors"),
        "write": lambda staging: staging.write("config.json", b"{}"),
        "copy": lambda staging: staging.copy(tmp_path / "card.md", "card.md"),
    }

    def run_out_of_room(staging: Staging) -> None:
        keep(staging, "a.safetensors")
        monkeypatch.setattr(os, "fsync", full)
        actions[action](staging)

    with pytest.raises(InputError) as error:
        use(destination, run_out_of_room)
    named = {"keep": JOURNAL, "write": "config.json", "copy": "card.md"}[action]
    assert str(error.value) == (
        f"cannot write {partial(destination) / named}: No space left on device; finished files are kept: make room, "
        "then go on with --resume"
    )
