"""`normkit record --template`: the file, to where it is told, and nothing overwritten."""

from __future__ import annotations

from pathlib import Path

from helpers import SOURCE

TEXT = (SOURCE / "comparison" / "normkit_recorder.py").read_text()


def test_the_template_is_written_where_one_stands_or_where_it_is_told(run) -> None:
    done = run("record", "--template")
    assert (done.exit_code, done.output) == (0, "wrote normkit_recorder.py; it needs numpy and safetensors alone\n")
    assert Path("normkit_recorder.py").read_text() == TEXT
    assert run("record", "--template", "a/b.py").exit_code == 0
    assert Path("a/b.py").read_text() == TEXT
    assert run("record", "--template", "-").output == TEXT


def test_nothing_is_overwritten_without_being_told(run) -> None:
    Path("a.py").write_text("mine")
    done = run("record", "--template", "a.py")
    assert (done.exit_code, done.stderr) == (
        2,
        "normkit: a.py exists; give another FILE, or --overwrite to replace it\n",
    )
    assert Path("a.py").read_text() == "mine"
    assert run("record", "--template", "a.py", "--overwrite").exit_code == 0
    assert Path("a.py").read_text() == TEXT


def test_without_template_it_says_how_torch_is_recorded(run) -> None:
    done = run("record")
    assert done.exit_code == 2
    assert "give --template; a model in torch is recorded in Python: nk.record(model, FILE)" in done.stderr
