from __future__ import annotations

from typing import Any

import pytest

from fleetplane.domains.proxies.acme.responder import PATH, WORKSPACE_HEADER, ChallengeBoard
from fleetplane.kernel.errors import InvalidArgument, ResourceExhausted
from fleetplane.sim.clock import VirtualClock


async def get(
    board: ChallengeBoard, path: str, method: str = "GET", *, workspace: str = ""
) -> tuple[int, bytes, dict[bytes, bytes]]:
    headers = [(WORKSPACE_HEADER, workspace.encode())] if workspace else []
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nobody reads the body of a GET")

    await board({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
    assert len(sent) == 2
    return sent[0]["status"], sent[1]["body"], dict(sent[0]["headers"])


async def test_a_challenge_is_answered_while_its_order_runs_and_not_after() -> None:
    board = ChallengeBoard(VirtualClock())
    with board.answering("tok-EN_1", "tok-EN_1.thumbprint"):
        status, body, headers = await get(board, f"{PATH}/tok-EN_1")
        assert (status, body) == (200, b"tok-EN_1.thumbprint")
        assert headers[b"content-length"] == b"19"
        assert (await get(board, f"{PATH}/tok-EN_1", "HEAD"))[:2] == (200, b"")
    assert (await get(board, f"{PATH}/tok-EN_1"))[0] == 404
    assert (board.asked, board.unknown) == (3, 1)


@pytest.mark.parametrize(
    "path", [PATH, f"{PATH}/", f"{PATH}/other", f"{PATH}/token/", "/token", f"{PATH}//token"]
)
async def test_everything_else_is_not_found(path: str) -> None:
    board = ChallengeBoard(VirtualClock())
    with board.answering("token", "x"):
        assert (await get(board, path))[0] == 404


async def test_nothing_is_written_over_http() -> None:
    board = ChallengeBoard(VirtualClock())
    with board.answering("token", "x"):
        assert (await get(board, f"{PATH}/token", "POST"))[0] == 404


def test_a_challenge_ends_also_when_its_order_fails() -> None:
    board = ChallengeBoard(VirtualClock())
    with pytest.raises(ZeroDivisionError), board.answering("token", "x"):
        raise ZeroDivisionError
    assert board.find("token") is None


async def test_a_forgotten_challenge_ends_by_itself() -> None:
    clock = VirtualClock()
    board = ChallengeBoard(clock, life_seconds=60)
    with board.answering("token", "x"):
        await clock.advance(59)
        assert board.find("token") == "x"
        await clock.advance(1)
        assert board.find("token") is None


def test_there_is_room_for_so_many_and_no_more() -> None:
    board = ChallengeBoard(VirtualClock(), limit=1)
    with board.answering("one", "x"):
        with pytest.raises(ResourceExhausted), board.answering("two", "x"):
            pass
        assert board.find("one") == "x"
    with board.answering("two", "x"):
        assert board.find("two") == "x"


@pytest.mark.parametrize("token", ["", "../secret", "a b", "ä", "a" * 257])
def test_a_token_that_no_authority_makes_is_refused(token: str) -> None:
    with pytest.raises(InvalidArgument), ChallengeBoard(VirtualClock()).answering(token, "x"):
        pass


@pytest.mark.parametrize(
    ("strict", "asked", "status"),
    [(False, "", 200), (False, "mine", 200), (False, "other", 404), (True, "", 404), (True, "mine", 200)],
)
async def test_a_challenge_is_answered_only_through_agents_of_its_own_workspace(
    strict: bool, asked: str, status: int
) -> None:
    board = ChallengeBoard(VirtualClock(), strict=strict)
    with board.answering("token", "x", workspace="mine"):
        assert (await get(board, f"{PATH}/token", workspace=asked))[0] == status
