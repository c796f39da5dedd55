"""The generated pages of the site, and what is asked of the built one."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import build_site
import built_site
import json_pages
from helpers import ROOT, SOURCE
from marking import marked
from normkit.checkpoint.plan import FoldPlan
from normkit.cli.entry import verbs
from normkit.inspection.result import Inspection
from normkit.rules import RULES
from normkit.rules.finding import Finding

PAGES = build_site.generated()


def test_the_generated_pages_are_all_there_and_always_the_same():
    expected = {f"reference/rules/{rule.id}.md" for rule in RULES} | {
        f"reference/commands/{name}.md" for name in verbs.commands
    }
    assert expected <= PAGES.keys()
    assert build_site.generated() == PAGES


@pytest.mark.parametrize("name", [name for name in PAGES if name.endswith(".md")])
def test_a_page_opens_with_what_the_reader_gets(name):
    """One heading of the first level, and a sentence under it."""
    text = re.sub(r"^---\n.*?\n---\n\n", "", PAGES[name], flags=re.DOTALL)
    heading, opening = text.split("\n\n")[:2]
    assert re.fullmatch(r"# .+", heading)
    assert re.match(r"[A-Z`].*[.:]", opening.replace("\n", " "))
    assert len(re.findall(r"^# ", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)) == 1


def test_the_address_of_each_rule_is_one_of_this_site():
    address = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["site_url"]
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert about["urls"]["Documentation"] == address
    for rule in RULES:
        name = rule.page.removeprefix(address)
        assert name.replace(".html", ".md") in PAGES


def test_each_option_of_each_command_is_told():
    for name, command in verbs.commands.items():
        for option in command.params:
            if option.opts[0].startswith("--") and not getattr(option, "hidden", False):
                assert f"{option.opts[0]}" in PAGES[f"reference/commands/{name}.md"]


@pytest.mark.parametrize("document", json_pages.DOCUMENTS, ids=lambda document: document["title"])
def test_the_keys_of_a_document_are_those_that_the_code_writes(document):
    name, _, function = document["code"].partition(":")
    tree = ast.parse((SOURCE / name).read_text(encoding="utf-8"))
    bodies = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    written = [
        {key.value for key in node.keys if isinstance(key, ast.Constant)}
        for body in bodies
        for node in ast.walk(body)
        if isinstance(node, ast.Dict)
    ]
    assert document["keys"].keys() in [keys for keys in written if "schema_version" in keys]


def test_every_field_of_an_inspection_and_of_a_plan_is_told():
    page = PAGES[json_pages.PAGE]
    for told in (*dataclasses.fields(Inspection), *dataclasses.fields(FoldPlan), *dataclasses.fields(Finding)):
        assert re.search(rf"\| `{told.name}` \| [^|]+ \| \S.*\|", page), told.name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x * rsqrt(v + eps)", r"x \* rsqrt(v + eps)"),
        ("nk.identify(module, shape).spec.eps shows it", "`nk.identify(module, shape).spec.eps` shows it"),
        ("E[x^2] under --intent, head_dim", r"E\[x\^2\] under `--intent`, `head_dim`"),
        ("run normkit inspect --train-step", "run `normkit inspect --train-step`"),
        ("says normkit itself", "says normkit itself"),
    ],
)
def test_text_is_text_and_code_is_code(text, expected):
    assert marked(text) == expected


def test_what_is_wrong_with_a_built_site_is_told(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="top"></h1><a href="b.html#end">b</a><a href="a.html#top">a</a><a href="gone.html">c</a>'
        '<a href="https://example.org">d</a><script src="https://example.org/x.js"></script>'
        '<img srcset="//x.org/y.png 2x">'
    )
    (tmp_path / "b.html").write_text('<link rel="canonical" href="https://example.org"><link rel="icon" href="b.html">')
    (tmp_path / "c.css").write_text(
        '@import "https://example.org/z.css"; a { background: url(data:image/png;base64,x) }'
    )
    assert sorted(built_site.faults(tmp_path)) == [
        "a.html links to b.html#end, which has no such anchor",
        "a.html links to gone.html, which is not there",
        "a.html loads //x.org/y.png",
        "a.html loads https://example.org/x.js",
        "c.css loads https://example.org/z.css",
    ]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(find_spec("zensical") is None, reason="make docs installs what builds the site")
def test_the_whole_site_is_built_without_a_fault():
    for command in (["docs/building/build_site.py"], ["-m", "zensical", "build", "--clean", "--strict"]):
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    assert built_site.faults(Path(built_site.SITE)) == []
