from __future__ import annotations

import grpc
import grpc.aio
import pytest
from grpc.aio import Metadata

from fleetplane.cli.exits import CommandFailed, Exit, explain
from fleetplane.kernel import errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgument("x"), 2),
        (errors.SettingsError("x"), 2),
        (errors.NotFound("x"), 4),
        (errors.PermissionDenied("x"), 5),
        (errors.Unauthenticated("x"), 5),
        (errors.AlreadyExists("x"), 6),
        (errors.Conflict("x"), 6),
        (errors.FailedPrecondition("x"), 6),
        (errors.Unavailable("x"), 8),
        (errors.StorageFull("x"), 8),
        (errors.IntegrityError("x"), 1),
        (errors.FleetplaneError("x"), 1),
        (CommandFailed(Exit.CONDITION_NOT_MET, "x"), 3),
        (CommandFailed(Exit.PARTIAL, "x"), 7),
        (TimeoutError(), 124),
        (PermissionError(13, "no"), 1),
    ],
)
def test_every_known_error_has_its_exit_code(error: Exception, code: int) -> None:
    failure = explain(error)
    assert failure is not None
    assert failure.code == code


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 2),
        (grpc.StatusCode.NOT_FOUND, 4),
        (grpc.StatusCode.PERMISSION_DENIED, 5),
        (grpc.StatusCode.UNAUTHENTICATED, 5),
        (grpc.StatusCode.ABORTED, 6),
        (grpc.StatusCode.ALREADY_EXISTS, 6),
        (grpc.StatusCode.UNAVAILABLE, 8),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 124),
        (grpc.StatusCode.INTERNAL, 1),
    ],
)
def test_a_call_that_failed_has_the_exit_code_of_its_status(status: grpc.StatusCode, code: int) -> None:
    failure = explain(grpc.aio.AioRpcError(status, Metadata(), Metadata(), details="words"))
    assert failure is not None
    assert failure.code == code


def test_the_line_has_the_hint_and_no_line_break() -> None:
    failure = explain(errors.NotFound("no\nsuch\tthing", hint="look elsewhere"))
    assert failure is not None
    assert failure.line == "no such thing (look elsewhere)"


def test_the_line_holds_nothing_that_a_terminal_would_obey() -> None:
    failure = explain(errors.NotFound("no \x1b[2Jgpu \x9b1m"))
    assert failure is not None
    assert failure.line == "no \ufffd[2Jgpu \ufffd1m"


def test_a_task_group_is_explained_by_its_first_cause() -> None:
    group = ExceptionGroup("tasks", [ExceptionGroup("more", [errors.Unavailable("no driver")])])
    failure = explain(group)
    assert failure is not None
    assert (failure.code, failure.line) == (Exit.UNAVAILABLE, "no driver")


def test_a_defect_is_not_explained_away() -> None:
    assert explain(ZeroDivisionError()) is None
