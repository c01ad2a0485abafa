"""Data on stdout: tables for people, JSON and YAML for programs.

A table in a terminal is coloured and fits the window. Anywhere else it is plain aligned text, one
row a line and never cut, so that grep and awk see whole values.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import click


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
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    empty: str
    """What to tell a person, on stderr, when there is nothing to show."""


format_option = click.option(
    "-o",
    "--output",
    type=click.Choice([choice.value for choice in Format]),
    default=Format.TABLE.value,
    show_default=True,
    callback=lambda _context, _parameter, value: Format(value),
    help="How to print.",
)


def emit(output: Format, data: object, table: Table) -> None:
    """Print `data` for programs or `table` for people; both say the same."""
    match output:
        case Format.JSON:
            click.echo(json.dumps(data, indent=2, ensure_ascii=False))
        case Format.YAML:
            click.echo(yaml_text(data), nl=False)
        case Format.TABLE:
            emit_table(table)


def emit_table(table: Table) -> None:
    if not table.rows:
        click.echo(table.empty, err=True)
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(rich_table(table))
    else:
        click.echo(plain_table(table))


def json_line(data: object) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def yaml_text(data: object) -> str:
    import yaml

    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def plain_table(table: Table) -> str:
    lines = [list(table.columns), *([flat(cell.text) for cell in row] for row in table.rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(table.columns))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def rich_table(table: Table) -> Any:
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=None, pad_edge=False, header_style="bold")
    for name in table.columns:
        drawn.add_column(name, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(flat(cell.text), style=cell.style) for cell in row))
    return drawn


def flat(text: str) -> str:
    """Names and messages come from providers; control characters in them must not reach a terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)
