"""One page per command, from what `--help` says, and their index."""

from __future__ import annotations

import inspect

import click

from marking import marked, table
from normkit.cli import entry

FOLDER = "reference/commands"
_EXITS = {
    "0": "done",
    "1": "findings at or above `--fail-on`, a difference, or a failed proof",
    "2": "wrong usage or input: one line on stderr says what was expected",
    "101": "a bug of normkit; `NORMKIT_TRACEBACK=1` shows where",
    "130": "interrupted",
}


def pages() -> dict[str, str]:
    """The content of each page, the index and the order of pages, by path."""
    with entry.verbs.make_context("normkit", [], resilient_parsing=True) as context:
        found = {heading: _commands(context, heading) for heading in entry._GROUPS}
    order = ["nav:", "  - index.md", *(f"  - {name}.md" for names in entry._GROUPS.values() for name in names)]
    return {
        f"{FOLDER}/.nav.yml": "\n".join(order) + "\n",
        f"{FOLDER}/index.md": _index(found),
        **{
            f"{FOLDER}/{name}.md": _page(name, command, context)
            for commands in found.values()
            for name, command in commands.items()
        },
    }


def _commands(context: click.Context, heading: str) -> dict[str, click.Command]:
    return {name: command for name in entry._GROUPS[heading] if (command := entry.verbs.get_command(context, name))}


def _index(found: dict[str, dict[str, click.Command]]) -> str:
    parts = [
        "# Commands",
        "Every command of `normkit` with all its options, as `normkit COMMAND --help` prints them, and what an exit "
        "code means. Results go to stdout, progress to stderr; with `--json` stdout is exactly one "
        "[JSON document](../json.md).",
    ]
    for heading, commands in found.items():
        rows = [
            (f"[`normkit {name}`]({name}.md)", marked(command.get_short_help_str(200)))
            for name, command in commands.items()
        ]
        parts += [f"## {heading}", table(("command", "what it does"), rows)]
    parts += ["## Exit codes", table(("code", "meaning"), _EXITS.items())]
    return "\n\n".join(parts) + "\n"


def _page(name: str, command: click.Command, parent: click.Context) -> str:
    with click.Context(command, parent=parent, info_name=name) as context:
        usage = " ".join(("normkit", name, *command.collect_usage_pieces(context)))
        records = [record for option in command.get_params(context) if (record := option.get_help_record(context))]
    opening, *rest = inspect.cleandoc(command.help or "").split("\n\n")
    parts = [f"# normkit {name}", marked(" ".join(opening.split())), f"```\n{usage}\n```", *map(_paragraph, rest)]
    parts += [
        "## Options",
        table(("option", "meaning"), [(_code(option), marked(words)) for option, words in records if words]),
    ]
    if command.epilog:
        parts += ["## Examples", _paragraph(inspect.cleandoc(command.epilog))]
    return "\n\n".join(parts) + "\n"


def _paragraph(text: str) -> str:
    """A paragraph of a help text; one that keeps its lines is a block of code."""
    if text.startswith("\b"):
        return "```\n" + text.removeprefix("\b").strip("\n") + "\n```"
    return marked(" ".join(text.split()))


def _code(option: str) -> str:
    return f"`{option}`".replace("|", "\\|")
