"""How many files of normkit a weight passes on its way into a folded checkpoint."""

from __future__ import annotations

import threading

import pytest
from click.testing import CliRunner

from helpers import files_entered
from normkit import demo
from normkit.checkpoint import fold
from normkit.cli.entry import verbs
from normkit.models.family import declared_family


def test_a_profile_sees_the_functions_of_all_threads():
    thread = threading.Thread(target=lambda: demo.directory("rmsnorm"))
    assert files_entered(lambda: (thread.start(), thread.join())) == {"demo/__init__.py"}
    assert files_entered(lambda: None) == set()


@pytest.mark.slow
def test_a_fold_is_read_in_at_most_twenty_four_files_and_its_command_in_four_more(tmp_path):
    source = demo.directory("rmsnorm")
    # The modules of transformers are loaded, and those of normkit.
    fold(source, tmp_path / "first", untie=True)
    declared_family.cache_clear()
    library = files_entered(lambda: fold(source, tmp_path / "library", untie=True))
    arguments = ["fold", str(source), str(tmp_path / "command"), "--untie", "--json"]
    declared_family.cache_clear()
    command = files_entered(lambda: CliRunner().invoke(verbs, arguments, catch_exceptions=False))
    assert len(library) <= 24
    assert command - library <= {"cli/entry.py", "cli/folding.py", "cli/terminal.py", "checkpoint/hub.py"}
