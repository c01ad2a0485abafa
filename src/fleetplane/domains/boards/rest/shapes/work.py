"""The shapes of programs run on boards, and of provisioning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import UNSET, UnsetType

from fleetplane.domains.boards.ports import ProvisioningAction, ProvisioningState
from fleetplane.domains.boards.rest.shapes.base import BoardShape, Data, Rows

# Programs.


class ShownOutcome(BoardShape, frozen=True, kw_only=True):
    """What a program came to on one board; without the fields of its end if it never ran."""

    command_id: str | UnsetType = UNSET
    """Where the answer is about one board alone."""
    node_id: int
    state: str
    success: bool
    message: str
    exit_code: int | UnsetType = UNSET
    stdout: str | UnsetType = UNSET
    stderr: str | UnsetType = UNSET
    stdout_truncated: bool | UnsetType = UNSET
    stderr_truncated: bool | UnsetType = UNSET
    started_at: str | UnsetType | None = UNSET
    duration_seconds: float | UnsetType = UNSET
    timed_out: bool | UnsetType = UNSET
    signal: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class IssuedCommand(BoardShape, frozen=True, kw_only=True):
    command_id: str
    node_ids: Sequence[int]
    count: int


class ShownCommand(BoardShape, frozen=True, kw_only=True):
    id: str
    command: str
    args: Sequence[str]
    requested_by: str
    created_at: str
    finished_at: str | None
    targets: int
    open: int
    outcomes_by_state: Mapping[str, int]


class CommandDetail(ShownCommand, frozen=True, kw_only=True):
    outcomes: Sequence[ShownOutcome]


class CommandRows(Rows[ShownCommand], frozen=True, kw_only=True):
    """Commands, newest first."""


class CommandData(Data[ShownCommand], frozen=True, kw_only=True):
    """One command."""


class CommandDetailData(Data[CommandDetail], frozen=True, kw_only=True):
    """One command, with what it came to on each board."""


# Provisioning.


class ShownStep(BoardShape, frozen=True, kw_only=True):
    node_id: int
    name: str
    state: ProvisioningState
    message: str
    started_at: str | None
    finished_at: str | None


class OrderAnswer(BoardShape, frozen=True, kw_only=True):
    success: bool
    """That it was accepted, or is what was asked for; not that it has ended."""
    message: str
    operation_id: str | None
    request_id: str | None
    state: ProvisioningState
    reason: str
    steps: Sequence[ShownStep]


class ShownOperation(BoardShape, frozen=True, kw_only=True):
    id: str
    action: ProvisioningAction
    state: ProvisioningState
    finished: bool
    reason: str
    node_ids: Sequence[int]
    cluster_id: int | None
    request_id: str | None
    requested_by: str
    created_at: str
    finished_at: str | None
    steps: Sequence[ShownStep]


class OperationRows(Rows[ShownOperation], frozen=True, kw_only=True):
    """Operations."""


class OperationData(Data[ShownOperation], frozen=True, kw_only=True):
    """One operation."""


# What provisioning keeps sealed.


class CredentialName(BoardShape, frozen=True, kw_only=True):
    name: str


class CredentialNames(BoardShape, frozen=True, kw_only=True):
    credentials: Sequence[CredentialName]
    count: int


class KeptCredential(CredentialName, frozen=True, kw_only=True):
    message: str


class ClusterToken(BoardShape, frozen=True, kw_only=True):
    cluster_token: str


class Kubeconfig(BoardShape, frozen=True, kw_only=True):
    kubeconfig: str
