"""Signs of life, and where an empty list was looked for."""

from __future__ import annotations

import io
import re
import threading

import click
import pytest
from click.testing import CliRunner

from fleetplane.cli.output import PrintedTable, drawing, emit_table, working


class Terminal(io.StringIO):
    """Remembers what was drawn, and tells when something was."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text.strip("\r\x1b[K"):
            self.drawn.set()
        return super().write(text)


def test_what_takes_long_says_so_and_takes_it_back() -> None:
    terminal = Terminal()
    with working("verifying the \x1b[2J log", stream=terminal, after=0.0):
        assert terminal.drawn.wait(60)
    text = terminal.getvalue()
    assert re.search(r"verifying the �\[2J log … \d+ s", text)  # as long as it took to begin
    assert text.endswith("\r\x1b[K")


def test_what_is_short_says_nothing_and_nothing_is_drawn_over_something_else() -> None:
    terminal = Terminal()
    with working("brief", stream=terminal, after=3600.0):
        pass
    with drawing(), working("covered", stream=terminal, after=0.0):
        pass
    assert terminal.getvalue() == ""


def test_a_pipe_gets_no_sign_of_life() -> None:
    pipe = io.StringIO()
    with working("anything", stream=pipe, after=0.0):
        pass
    assert pipe.getvalue() == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "no runs\n"),
        (("--tenant", "acme"), "no runs (tenant acme)\n"),
        (("--tenant", "acme", "--server", "https://fleet"), "no runs (tenant acme, https://fleet)\n"),
        (("--context", "prod"), "no runs (context prod)\n"),
    ],
)
def test_an_empty_list_says_where_was_looked(words: tuple[str, ...], told: str) -> None:
    @click.command()
    @click.option("--tenant", default="")
    @click.option("--server", default="")
    @click.option("--context", default="")
    def verb(**_: str) -> None:
        emit_table(PrintedTable(columns=("RUN",), rows=[], empty="no runs"))

    done = CliRunner().invoke(verb, words)
    assert (done.stdout, done.stderr) == ("", told)
