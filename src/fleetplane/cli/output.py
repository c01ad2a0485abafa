"""Data on stdout: tables for people, JSON and YAML for programs; and progress on stderr.

A table in a terminal is coloured and fits the window. Anywhere else it is plain aligned text, one
row a line and never cut, so that grep and awk see whole values. Progress is shown in a terminal alone,
for work that takes more than a second.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TextIO

import click

AFTER_SECONDS = 1.0
EVERY_SECONDS = 0.5
WIDTH = 78
"""Characters of the line, which is drawn over: one that wraps could not be taken back."""
_is_drawing: ContextVar[bool] = ContextVar("is_drawing", default=False)


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """While something else draws on the terminal, nothing is drawn over it."""
    before = _is_drawing.set(True)
    try:
        yield
    finally:
        _is_drawing.reset(before)


@contextlib.contextmanager
def working(words: str, *, stream: TextIO | None = None, after: float = AFTER_SECONDS) -> Iterator[None]:
    """Say what is done, and for how long already, once it takes longer than a second; then take it back.

    Only in a terminal: a log or a pipe gets nothing of it. What lies within another such stretch is part of
    that one.
    """
    out = sys.stderr if stream is None else stream
    if _is_drawing.get() or not out.isatty():
        yield
        return
    from fleetplane.cli.output import flat

    over, began = threading.Event(), time.monotonic()

    def draw() -> None:
        if over.wait(after):
            return
        while True:
            text = f"{flat(words)} … {time.monotonic() - began:.0f} s"
            with contextlib.suppress(OSError, ValueError):  # a terminal that is gone needs no sign
                out.write(f"\r\x1b[K{text[:WIDTH]}")
                out.flush()
            if over.wait(EVERY_SECONDS):
                break
        with contextlib.suppress(OSError, ValueError):
            out.write("\r\x1b[K")
            out.flush()

    drawer = threading.Thread(target=draw, name="progress", daemon=True)
    drawer.start()
    try:
        with drawing():
            yield
    finally:
        over.set()
        drawer.join()


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    text: str
    style: str = ""
    """A rich style; has no effect outside a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedTable:
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    empty: str
    """The message on stderr when there is nothing to show."""


format_option = click.option(
    "-o",
    "--output",
    type=click.Choice([choice.value for choice in Format]),
    default=Format.TABLE.value,
    show_default=True,
    callback=lambda _context, _parameter, value: Format(value),
    help="How to print.",
)


def emit(output: Format, data: object, table: PrintedTable) -> None:
    """Print `data` for programs or `table` for people; both say the same."""
    match output:
        case Format.JSON:
            click.echo(json.dumps(data, indent=2, ensure_ascii=False))
        case Format.YAML:
            click.echo(yaml_text(data), nl=False)
        case Format.TABLE:
            emit_table(table)


def emit_table(table: PrintedTable) -> None:
    if not table.rows:
        say(f"{table.empty}{looked_at()}" if table.empty else "")
        return
    if sys.stdout.isatty():
        from shutil import get_terminal_size

        click.echo(terminal_table(table, get_terminal_size().columns, colour=has_colour()))
        return
    click.echo(plain_table(table))


def looked_at() -> str:
    """Where a list was looked for that is empty: tenant, workspace or scope, and which server, as asked."""
    context = click.get_current_context(silent=True)
    if context is None:
        return ""
    given = context.params
    parts = [f"{name} {given[name]}" for name in ("tenant", "group", "workspace", "scope") if given.get(name)]
    if given.get("server"):
        parts.append(str(given["server"]))
    elif given.get("data_dir"):
        parts.append(f"the server at {given['data_dir']}")
    elif given.get("context"):
        parts.append(f"context {given['context']}")
    return f" ({', '.join(parts)})" if parts else ""


def has_colour() -> bool:
    """Whether the terminal is to have colours: unless somebody asked for none (no-color.org)."""
    from fleetplane import environment

    known = environment.current()
    return not known.get("NO_COLOR") and known.get("TERM") != "dumb"


LEAST_WIDTH = 8
"""To which a column is shortened at most: enough to recognise what it holds."""


def terminal_table(table: PrintedTable, width: int, *, colour: bool) -> str:
    """A table that fits a window: what is too long is shortened, the widest column first."""
    lines = [list(table.columns), *([flat(cell.text) for cell in row] for row in table.rows)]
    widths = fitted([max(len(line[index]) for line in lines) for index in range(len(table.columns))], width)

    def drawn(text: str, room: int, last: bool, style: str) -> str:
        short = text if len(text) <= room else text[: room - 1] + "…"
        padded = short if last else short.ljust(room)
        return click.style(padded, **_STYLES[style]) if colour and style in _STYLES else padded

    styles = [["bold"] * len(table.columns), *([cell.style for cell in row] for row in table.rows)]
    return "\n".join(
        "  ".join(
            drawn(text, room, index == len(line) - 1, style)
            for index, (text, room, style) in enumerate(zip(line, widths, styled, strict=True))
        ).rstrip()
        for line, styled in zip(lines, styles, strict=True)
    )


def fitted(widths: Sequence[int], width: int) -> list[int]:
    """Widths that fit into a line, each as wide as it can be; shortened from the widest down."""
    found = list(widths)
    room = width - 2 * (len(found) - 1)
    while found and sum(found) > room and max(found) > LEAST_WIDTH:
        widest = max(found)
        index = found.index(widest)
        others = [one for place, one in enumerate(found) if place != index]
        below = max((one for one in others if one < widest), default=LEAST_WIDTH)
        found[index] = max(below, widest - (sum(found) - room), LEAST_WIDTH)
        if found[index] == widest:  # several are as wide: one character less each
            found[index] -= 1
    return found


_STYLES: dict[str, dict[str, Any]] = {
    "bold": {"bold": True},
    "dim": {"dim": True},
    **{name: {"fg": name} for name in ("red", "green", "yellow", "cyan", "blue", "magenta")},
    **{f"bold {name}": {"fg": name, "bold": True} for name in ("red", "green", "yellow")},
}


def json_line(data: object) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def yaml_text(data: object, *, allow_unicode: bool = True) -> str:
    import yaml

    return str(yaml.dump(data, Dumper=_dumper(), sort_keys=False, allow_unicode=allow_unicode))


@cache
def _dumper() -> type[Any]:
    """Writes text in quotes that some reader of YAML would take for a number, such as the id 12e45678.

    For the library, which follows YAML 1.1, that is text anyway; for readers of YAML 1.2 it is infinity.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    number = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$")
    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Dumper


def plain_table(table: PrintedTable) -> str:
    lines = [list(table.columns), *([flat(cell.text) for cell in row] for row in table.rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(table.columns))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def rich_table(table: PrintedTable) -> Any:
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=None, pad_edge=False, header_style="bold")
    for name in table.columns:
        drawn.add_column(name, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(flat(cell.text), style=cell.style) for cell in row))
    return drawn


def say(message: str) -> None:
    """A message for people, on stderr; nothing in it that a terminal would obey."""
    click.echo("\n".join(flat(line) for line in message.split("\n")), err=True)


def flat(text: str) -> str:
    """Names and messages come from providers; control characters in them must not reach a terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)
