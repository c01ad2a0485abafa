"""What is wrong with a document, where, in words. Collected, so that one look shows everything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from fleetplane.domains.instances.configuration.jsonc import JsoncDocument, Path, TextPosition
from fleetplane.kernel.errors import InvalidArgument

MAX_PROBLEMS = 200  # more than anyone reads; a document of nonsense must not become a book
SHOWN_IN_MESSAGE = 5

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentProblem:
    path: str
    """As a person would write it: `templates.knc.files["node.env"].kind`. Empty for the whole document."""
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{self.line}:{self.column}: {where}{self.message}"


class ConfigurationInvalid(InvalidArgument):
    """The document cannot be used. Nothing of it was applied."""

    reason = "INVALID_CONFIGURATION"
    hint = "`fleetplane instances config validate FILE` shows every problem with its line"

    def __init__(self, name: str, problems: Sequence[DocumentProblem]) -> None:
        self.name = name
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = "; ".join(f"{name}:{problem}" for problem in self.problems[:SHOWN_IN_MESSAGE])
        rest = f"; and {count - SHOWN_IN_MESSAGE} more" if count > SHOWN_IN_MESSAGE else ""
        what = "1 problem" if count == 1 else f"{count} problems"
        super().__init__(f"the configuration has {what}: {lines}{rest}", field=self.problems[0].path)


def render(path: Path) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_KEY.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f'["{part}"]'
    return text


@dataclass(slots=True, kw_only=True)
class ProblemReport:
    """Gathers problems of one document. One path has one problem: the first is the cause of the rest."""

    document: JsoncDocument
    problems: list[DocumentProblem] = field(default_factory=list)
    seen: set[Path] = field(default_factory=set)
    rejected: set[Path] = field(default_factory=set)
    """Values that were put aside. What stands in for them is nobody's mistake."""

    def add(self, path: Path, message: str, *, at_key: bool = False) -> None:
        place = self.document.key_position(path) if at_key else self.document.position(path)
        self.add_at(path, place, message)

    def reject(self, path: Path, message: str, *, at_key: bool = False) -> None:
        """As `add`, and keep silent about everything within."""
        self.add(path, message, at_key=at_key)
        self.rejected.add(path)

    def add_at(self, path: Path, place: TextPosition, message: str) -> None:
        within_rejected = any(path[:length] in self.rejected for length in range(len(path)))
        if within_rejected or path in self.seen or len(self.problems) >= MAX_PROBLEMS:
            return
        self.seen.add(path)
        self.problems.append(
            DocumentProblem(path=render(path), line=place.line, column=place.column, message=message)
        )

    def in_order(self) -> tuple[DocumentProblem, ...]:
        return tuple(sorted(self.problems, key=lambda problem: (problem.line, problem.column, problem.path)))
