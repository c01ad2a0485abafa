"""How verbs of edge end: as every other verb, or as is documented for edge fleets."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from fleetplane.cli import exits
from fleetplane.cli.running.run_view import RunDone
from fleetplane.domains.edge.cli.exits import COMMON, EdgeExit, edge_exits, exit_codes_option
from fleetplane.domains.edge.cli.runs import exit_code
from fleetplane.kernel.errors import (
    AlreadyExists,
    Conflict,
    FleetplaneError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
)


def ended(state: str = "completed", **summary: int) -> RunDone:
    counts = {"ok": 0, "err": 0, "not_started": 0, "cancelled": 0, "timed_out": 0}
    return RunDone(state=state, summary=counts | summary)


@pytest.mark.parametrize(
    ("run", "common", "documented"),
    [
        (ended(ok=2), 0, 0),
        (ended(err=2), 1, 1),
        (ended(ok=1, err=1), 7, 1),
        (ended(ok=1, not_started=1), 7, 1),
        (ended("halted", ok=1, err=1), 7, 6),
        (ended("cancelled", cancelled=2), 1, 7),
        (ended(ok=1, timed_out=1), 124, 8),
    ],
)
def test_a_run_ends_with_the_code_of_the_table_that_was_chosen(
    run: RunDone, common: int, documented: int
) -> None:
    assert exit_code(run, documented=False) == common
    assert exit_code(run, documented=True) == documented


ERRORS: list[tuple[Exception, int, int]] = [
    (PermissionDenied("no"), 5, 3),
    (InvalidArgument("no"), 2, 2),
    (AlreadyExists("no"), 6, 4),
    (Conflict("no"), 6, 4),
    (NotFound("no"), 4, 1),
    (Unavailable("no", details={"cause": "EdgeUnavailable"}), 8, 5),
    (Conflict("no", details={"cause": "RequireMinNotSatisfied"}), 3, 9),
    (TimeoutError("no"), 124, 8),
    (FleetplaneError("no"), 1, 1),
]


@pytest.mark.parametrize(("error", "common", "documented"), ERRORS)
def test_an_error_ends_with_the_code_of_the_table_that_was_chosen(
    error: Exception, common: int, documented: int
) -> None:
    @click.group()
    @exit_codes_option
    def group() -> None:
        pass

    @group.command()
    @edge_exits
    def verb() -> None:
        raise error

    raised = CliRunner().invoke(group, ["verb"]).exception
    assert raised is not None
    failure = exits.explain(raised)
    assert failure is not None
    assert failure.code == common
    for words, variables in ((["--exit-codes", "documented", "verb"], {}), (["verb"], {"documented": True})):
        given = {"FLEETPLANE_EDGE_EXIT_CODES": "documented"} if variables else {}
        assert CliRunner(env=given).invoke(group, words).exit_code == documented


def test_every_documented_code_has_a_common_one_with_the_common_meaning() -> None:
    assert set(COMMON) == set(EdgeExit)
    assert all(isinstance(code, exits.Exit) for code in COMMON.values())
