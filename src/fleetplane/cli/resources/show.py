"""Objects and tables of the resource API on stdout, in every form that `-o` names.

For `-o jsonpath` a small part of JSONPath, as kubectl has it: `.a.b`, `[0]`, `[*]`, `['a.b']`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from fleetplane.cli.output import Cell, PrintedTable, emit_table, flat, say, yaml_text
from fleetplane.kernel.errors import IntegrityError, InvalidArgument

_STEP = re.compile(
    r"""\.(?P<key>[A-Za-z_][\w-]*) | \[(?P<index>-?\d{1,9})\] | \[(?P<all>\*)\]
    | \[(?P<quote>['"])(?P<quoted>[^'"]*)(?P=quote)\]""",
    re.VERBOSE,
)
Step = str | int | None
"""A key, a place in a list, or (None) everything."""


def parsed(text: str) -> tuple[Step, ...]:
    """The steps of a path; raises `InvalidArgument`."""
    path = text.strip()
    if path.startswith("{") and path.endswith("}"):
        path = path[1:-1].strip()
    path = path.removeprefix("$")
    if path in ("", "."):
        return ()
    if path[0] not in ".[":
        path = "." + path
    steps: list[Step] = []
    place = 0
    while place < len(path):
        found = _STEP.match(path, place)
        if found is None:
            raise InvalidArgument(
                f"{text!r} is no path: {path[place:]!r} is not understood",
                field="output",
                hint="such as jsonpath=.items[*].metadata.name",
            )
        if found["index"] is not None:
            steps.append(int(found["index"]))
        else:
            steps.append(None if found["all"] else found["key"] or found["quoted"])
        place = found.end()
    return tuple(steps)


def values(data: Any, steps: tuple[Step, ...]) -> Iterator[Any]:
    """What lies at a path, in order; nothing where nothing does."""
    if not steps:
        yield data
        return
    step, rest = steps[0], steps[1:]
    if step is None:
        inside = data.values() if isinstance(data, Mapping) else data if isinstance(data, list) else ()
        for one in inside:
            yield from values(one, rest)
    elif isinstance(step, int):
        if isinstance(data, list) and -len(data) <= step < len(data):
            yield from values(data[step], rest)
    elif isinstance(data, Mapping) and step in data:
        yield from values(data[step], rest)


F = TypeVar("F", bound=Callable[..., Any])
FORMS = ("table", "wide", "json", "yaml", "name")
JSONPATH = "jsonpath="
GOOD = frozenset(
    {"true", "ready", "healthy", "connected", "online", "active", "running", "succeeded", "ok", "registered"}
)
BAD = frozenset(
    {"false", "unhealthy", "offline", "failed", "disconnected", "dead", "error", "expired", "revoked"}
)
MIDDLING = frozenset({"unknown", "degraded", "partly_failed", "pending", "stale", "provisioning", "draining"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """How to print."""

    name: str
    path: tuple[Step, ...] = ()

    @property
    def is_table(self) -> bool:
        """Whether people read it."""
        return self.name in ("table", "wide")


class _FormType(click.ParamType[OutputForm]):
    name = "format"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> OutputForm:
        if isinstance(value, OutputForm):
            return value
        text = str(value)
        if text.startswith(JSONPATH):
            return OutputForm(name="jsonpath", path=parsed(text.removeprefix(JSONPATH)))
        if text not in FORMS:
            self.fail(f"{text!r} is none of {', '.join(FORMS)}, jsonpath=PATH", param, ctx)
        return OutputForm(name=text)


def _complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    return [one for one in (*FORMS, JSONPATH) if one.startswith(incomplete)]


def form_option(command: F) -> F:
    """`-o`, in every form that objects have."""
    return click.option(
        "-o",
        "--output",
        type=_FormType(),
        default="table",
        show_default=True,
        shell_complete=_complete,
        metavar="table|wide|json|yaml|name|jsonpath=",
        help="How to print.",
    )(command)


def emit_data(form: OutputForm, data: Any) -> None:
    """Print an object or a list of objects for programs."""
    match form.name:
        case "json":
            click.echo(safe_json(data, indent=2))
        case "yaml":
            click.echo(safe_yaml(data), nl=False)
        case "jsonpath":
            for found in values(data, form.path):
                click.echo(flat(found) if isinstance(found, str) else safe_json(found))
        case "name":
            for one in data["items"] if isinstance(data, Mapping) and "items" in data else [data]:
                click.echo(flat(f"{one['kind']}/{one['metadata']['name']}"))


_UNSEEN = re.compile(r"[^\n\x20-\x7e]")


def safe_json(data: Any, *, indent: int | None = None) -> str:
    """JSON in which nothing is left that a terminal would obey: what cannot be printed is escaped."""
    text = json.dumps(data, ensure_ascii=False, indent=indent)
    return _UNSEEN.sub(lambda found: found[0] if found[0].isprintable() else _escaped(found[0]), text)


def safe_yaml(data: Any) -> str:
    """YAML in which nothing is left that a terminal would obey; ASCII alone if the data would not be safe."""
    text = yaml_text(data)
    if all(character.isprintable() or character == "\n" for character in text):
        return text
    return yaml_text(data, allow_unicode=False)


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1] if ord(character) >= 0x80 else f"\\u{ord(character):04x}"


def emit_rows(
    contents: Sequence[Any], *, wide: bool, empty: Callable[[], str], kind: str = "", now: float | None = None
) -> None:
    """Print the pages of a table; `kind` stands before names where several kinds are shown."""
    drawn = drawn_table(contents, wide=wide, kind=kind, now=time.time() if now is None else now)
    if drawn.rows:
        emit_table(drawn)
    else:
        say(empty())


def drawn_table(contents: Sequence[Any], *, wide: bool, kind: str, now: float) -> PrintedTable:
    """The pages of a table as one table; with scopes, where they differ. Pure."""
    try:
        columns = [
            (str(one["title"]), str(one.get("type")), bool(one.get("wide"))) for one in contents[0]["columns"]
        ]
        rows = [row for content in contents for row in content["rows"]]
        scopes = {str(row["object"]["scope"]) for row in rows}
        shown = [index for index, column in enumerate(columns) if wide or not column[2]]
        has_scope = wide or len(scopes) > 1
        cells = [
            [
                *([Cell(text=str(row["object"]["scope"]))] if has_scope else []),
                *(_cell(columns[index], row["cells"][index], kind, index, now) for index in shown),
            ]
            for row in rows
        ]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise IntegrityError(f"the server's answer is no table: {error!r}") from error
    titles = [*(["SCOPE"] if has_scope else []), *(columns[index][0] for index in shown)]
    return PrintedTable(columns=[flat(title) for title in titles], rows=cells, empty="")


def _cell(column: tuple[str, str, bool], value: Any, kind: str, index: int, now: float) -> Cell:
    if column[1] == "age":
        return Cell(text=age(value, now))
    text = (
        "-" if value is None or value == "" else str(value).lower() if isinstance(value, bool) else str(value)
    )
    if index == 0 and kind:
        text = f"{kind}/{text}"
    return Cell(text=text, style=style_of(text))


def style_of(text: str) -> str:
    """The colour of a word that says how something is."""
    word = text.lower()
    return "green" if word in GOOD else "red" if word in BAD else "yellow" if word in MIDDLING else ""


UNITS = ((86_400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s"))


def age(value: Any, now: float) -> str:
    """The time since a moment, in its two largest units: `5m12s`, `3h`, `12d`."""
    from datetime import datetime

    if not value:
        return "-"
    try:
        seconds = int(now - datetime.fromisoformat(str(value)).timestamp())
    except (ValueError, OverflowError, OSError):
        return str(value)
    if seconds < 0:
        return "0s"
    for size, unit, smaller, small_unit in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if seconds >= size:
            count, rest = divmod(seconds, size)
            more = f"{rest // smaller}{small_unit}" if count < 10 and rest // smaller else ""
            return f"{count}{unit}{more}"
    return f"{seconds}s"
