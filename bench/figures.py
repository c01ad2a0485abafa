"""What a published figure is, and how one is printed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HEADER = ("Figure", "Fleetplane", "Reference", "Ratio", "Must reach", "Verdict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard to measure. The figures' meaning does not depend on it, only their noise."""

    rounds: int = 7
    """Times that ours and the reference are measured, in turns.

    The best round of each is published: whatever else a machine does in the meantime only slows
    a round down, so the best one says most about the program.
    """
    seconds: float = 2.0
    """Of load in each round."""
    updates: int = 40
    """Fan-outs in each round."""
    gpus: int | None = None
    """Fewer GPUs than the figure says, to try the script out."""
    watches: int | None = None
    """Fewer watches than the figure says, likewise."""


QUICK = Effort(rounds=1, seconds=0.3, updates=3, gpus=16, watches=20)
"""Shows that everything works; its numbers mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    figure: str
    ours: str
    reference: str
    ratio: float | None
    """How many times better than the reference; None for a figure against a fixed bound."""
    must_reach: str
    reached: bool
    note: str = ""
    """What was seen beside the figure itself."""

    def cells(self) -> tuple[str, ...]:
        ratio = "" if self.ratio is None else f"{self.ratio:.{1 if self.ratio >= 1 else 2}f} ×"
        return (
            self.figure,
            self.ours,
            self.reference,
            ratio,
            self.must_reach,
            "reached" if self.reached else "not reached",
        )


Measure = Callable[[Effort], Sequence[Row]]


def against(
    *, figure: str, ours: float, reference: float, must: float, show: Callable[[float], str], note: str = ""
) -> Row:
    """A figure that is a quotient: `ours` over `reference`, both the larger the better."""
    ratio = ours / reference
    return Row(
        figure=figure,
        ours=show(ours),
        reference=show(reference),
        ratio=ratio,
        must_reach=f"{must:g} ×",
        reached=ratio >= must,
        note=note,
    )


def table(rows: Sequence[Row]) -> str:
    """As Markdown, aligned so that a terminal shows it well too."""
    lines = [HEADER, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]

    def shown(line: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([shown(HEADER), rule, *(shown(line) for line in lines[1:])])


def show(rows: Sequence[Row]) -> None:
    print(table(rows))
    for row in rows:
        if row.note:
            print(f"{row.figure}: {row.note}")


def alone(measure: Measure, description: str | None) -> None:
    """The main program of one figure's script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="try the script out; its numbers mean nothing")
    show(measure(QUICK if parser.parse_args().quick else Effort()))
