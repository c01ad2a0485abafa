"""Which board is which, what blanks do, and how a state follows from who speaks of it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.boards import rules
from fleetplane.domains.boards.kinds import (
    BOARD,
    SCOPE,
    Board,
    BoardRole,
    BoardSilence,
    BoardSpec,
    BoardState,
    BoardStatus,
)
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.domains.boards.wire import join_token
from fleetplane.kernel.errors import AlreadyExists, InvalidArgument
from fleetplane.kernel.resources import Resource

D, P, R, N, M, F, U = (
    BoardState.DISCOVERED,
    BoardState.PROVISIONING,
    BoardState.READY,
    BoardState.NOT_READY,
    BoardState.MAINTENANCE,
    BoardState.FAILED,
    BoardState.UNKNOWN,
)
SPEC = BoardSpec(
    name="pi-1",
    ip_address="10.0.0.1",
    mac_address="dc:a6:32:00:00:01",
    architecture="arm64",
    model="Raspberry Pi 5",
    serial_number="s1",
    cpu_cores=4,
    memory_bytes=8 << 30,
    cluster_id=3,
    role=BoardRole.MASTER,
    os_version="Debian 12",
    kernel_version="6.6.31",
)


def board(number: int, spec: BoardSpec) -> Board:
    return Resource(
        kind=BOARD.name,
        scope=SCOPE,
        name=str(number),
        uid="u",
        labels={},
        spec=spec,
        status=BoardStatus(state=R),
        conditions=(),
        revision=1,
        created_revision=1,
        generation=1,
        created_at_ns=0,
        updated_at_ns=0,
    )


@pytest.mark.parametrize(
    ("declared", "reported", "silence", "state"),
    [
        (R, None, BoardSilence.NONE, R),
        (R, None, BoardSilence.STALE, N),
        (R, None, BoardSilence.DEAD, U),
        (R, N, BoardSilence.NONE, N),
        (R, F, BoardSilence.NONE, F),
        (R, F, BoardSilence.STALE, N),
        (R, M, BoardSilence.NONE, M),
        (R, M, BoardSilence.DEAD, M),  # said goodbye
        (D, None, BoardSilence.NONE, D),
        (D, None, BoardSilence.DEAD, U),
        (P, N, BoardSilence.DEAD, P),  # a board that is being installed reboots
        (F, None, BoardSilence.DEAD, F),
        (M, None, BoardSilence.DEAD, M),
    ],
)
def test_one_state_follows_from_three_voices(
    declared: BoardState, reported: BoardState | None, silence: BoardSilence, state: BoardState
) -> None:
    status = BoardStatus(state=R, declared=declared, reported=reported, silence=silence)

    assert rules.state_of(status) is state


def test_a_board_that_is_heard_again_is_what_it_was() -> None:
    silent = rules.settled(BoardStatus(state=R, silence=BoardSilence.DEAD), now_ns=1)

    back = rules.settled(rules.heard(silent, None), now_ns=2)

    assert (silent.state, back.state) == (U, R)
    assert (back.previous_state, back.state_changed_at_ns) == (U, 2)


@pytest.mark.parametrize("declared", [P, D, F, M])
def test_repeating_what_it_was_told_undoes_nothing(declared: BoardState) -> None:
    status = BoardStatus(state=declared, declared=declared, registration_state=R)

    assert rules.settled(rules.heard(status, R), now_ns=1) == status


def test_an_echo_of_a_state_that_has_passed_is_no_news() -> None:
    # Registered while an operator had it in maintenance, which is over by now.
    status = BoardStatus(state=R, declared=R, registration_state=M)

    assert rules.settled(rules.heard(status, M), now_ns=1).state is R


@pytest.mark.parametrize("said", [P, D, U])
def test_a_board_cannot_say_what_is_the_server_s_to_say(said: BoardState) -> None:
    assert rules.settled(rules.heard(BoardStatus(state=R), said), now_ns=1).state is R


def test_a_restart_ends_the_maintenance_that_the_board_declared_itself() -> None:
    down = rules.settled(rules.heard(BoardStatus(state=R, registered_at_ns=1), M), now_ns=2)

    up = rules.registered(down, now_ns=3)

    assert (down.state, up.state) == (M, R)


def test_a_restart_does_not_end_an_operator_s_maintenance() -> None:
    status = BoardStatus(state=M, declared=M, registered_at_ns=1)

    assert rules.registered(status, now_ns=2).state is M


def test_the_first_agent_makes_a_written_down_board_ready_and_a_later_one_does_not() -> None:
    written_down = BoardStatus(state=D, declared=D)
    sent_back = BoardStatus(state=D, declared=D, registered_at_ns=1)

    assert rules.registered(written_down, now_ns=2).state is R
    assert rules.registered(sent_back, now_ns=2).state is D


def test_blanks_zeros_and_linux_overwrite_nothing() -> None:
    assert rules.merged(SPEC, BoardFacts(os_version="linux")) == SPEC
    assert rules.merged(SPEC, BoardFacts()) == SPEC


def test_what_is_said_overwrites_and_linux_is_better_than_nothing() -> None:
    changed = rules.merged(SPEC, BoardFacts(ip_address="10.0.0.9", memory_bytes=1, os_version="Debian 13"))
    unknown = rules.merged(BoardSpec(name="x"), BoardFacts(os_version="linux"))

    assert (changed.ip_address, changed.memory_bytes, changed.os_version) == ("10.0.0.9", 1, "Debian 13")
    assert unknown.os_version == "linux"


def test_cluster_zero_leaves_the_cluster_and_none_stays() -> None:
    assert rules.merged(SPEC, BoardFacts(cluster_id=0)).cluster_id is None
    assert rules.merged(SPEC, BoardFacts(cluster_id=None)).cluster_id == 3


def test_a_machine_says_neither_its_role_nor_its_cluster() -> None:
    said = BoardFacts(role=BoardRole.WORKER, cluster_id=9, model="x").of_machine()

    assert rules.merged(SPEC, said) == msgspec.structs.replace(SPEC, model="x")


def test_the_serial_is_stronger_than_the_address_and_that_than_the_name() -> None:
    boards = {
        ("serial", "s1"): board(1, BoardSpec(name="a", serial_number="s1")),
        ("mac", "02:00:00:00:00:02"): board(2, BoardSpec(name="b", mac_address="02:00:00:00:00:02")),
        ("name", "c"): board(3, BoardSpec(name="c")),
    }

    def found(serial_number: str = "", mac_address: str = "", name: str = "") -> str | None:
        facts = BoardFacts(serial_number=serial_number, mac_address=mac_address, name=name)
        board = rules.recognise(facts, lambda key, value: boards.get((key, value)))
        return board.name if board is not None else None

    assert found(serial_number="s1", mac_address="02:00:00:00:00:02", name="c") == "1"
    assert found(mac_address="02:00:00:00:00:02", name="c") == "2"
    assert found(name="c") == "3"
    assert found(name="d") is None


def test_a_name_on_other_hardware_is_not_the_same_board() -> None:
    known = board(1, SPEC)

    with pytest.raises(AlreadyExists, match="belongs to board 1"):
        rules.recognise(
            BoardFacts(name="pi-1", serial_number="other"), lambda key, _: known if key == "name" else None
        )


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        (BoardFacts(mac_address="nonsense"), "mac_address"),
        (BoardFacts(ip_address="not an address"), "ip_address"),
        (BoardFacts(name="a\nb"), "name"),
        (BoardFacts(name="n" * 254), "name"),
        (BoardFacts(cpu_cores=-1), "cpu_cores"),
        (BoardFacts(memory_bytes=-1), "memory"),
        (BoardFacts(model="m" * 257), "model"),
    ],
)
def test_bad_facts_are_refused_by_their_field(facts: BoardFacts, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        rules.checked(facts)

    assert refused.value.field == field


def test_facts_come_in_one_spelling() -> None:
    facts = rules.checked(BoardFacts(mac_address="DC-A6-32-00-00-01", ip_address="::0001", name=" pi "))

    assert (facts.mac_address, facts.ip_address, facts.name) == ("dc:a6:32:00:00:01", "::1", "pi")


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_a_join_token_reads_back(secret: bytes, fingerprint: bytes) -> None:
    made = join_token.make(secret, fingerprint.hex())

    assert join_token.parse(str(made)) == made
    assert made.secret not in repr(made)


@pytest.mark.parametrize("text", ["", "fpb_", "fp_x.y", "fpb_" + "a" * 43 + "." + "g" * 64, "x" * 10_000])
def test_other_text_is_no_join_token(text: str) -> None:
    with pytest.raises(InvalidArgument):
        join_token.parse(text)
