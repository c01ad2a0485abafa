"""What docs/boards.md says is so: its commands, its settings and its example of a configuration."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from fleetplane import settings
from fleetplane.cli.main import fleetplane
from fleetplane.domains.boards.agent import config as node_config

PAGE = (Path(__file__).parents[3] / "docs" / "boards.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    line.partition("#")[0].strip()
    for block in BLOCKS
    for line in block.splitlines()
    if line.startswith("fleetplane ")
]


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_page_exists_with_its_options(line: str) -> None:
    words = shlex.split(line)[1:]
    words = words[: words.index("--")] if "--" in words else words
    command: click.Command = fleetplane
    context = click.Context(command)
    while isinstance(command, click.Group):
        name = words.pop(0)
        found = command.get_command(context, name)
        assert found is not None, f"there is no {name}"
        command = found
    known = {
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    assert {word for word in words if word.startswith("-")} <= known


def test_the_example_of_a_boards_configuration_is_one() -> None:
    example = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    config = node_config.decode(tomllib.loads(example[1]))
    assert [profile.name for profile in config.commands.policy().profiles] == ["diagnostics", "camera"]
    assert config.gpio.policy().rules[17].safe_on_loss
    programs = next(one for one in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if "[programs]" in one)
    (profile,) = node_config.decode(tomllib.loads(programs)).programs.policy().profiles
    assert profile.rules[0].allows(("--rate", "10"))


def test_every_setting_of_boards_is_on_the_page_and_no_other() -> None:
    table = PAGE.partition("## Settings")[2]
    told = set(re.findall(r"^\| `(boards\.\w+)` \|", table, re.MULTILINE))
    assert told == {key for key, _ in settings.known_keys() if key.startswith("boards.")}
