from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fleetplane.client import local
from fleetplane.client.contexts import Context, ContextFile
from fleetplane.client.places import Place, completed, is_remote, owner_directory, resolve
from fleetplane.kernel.errors import Conflict, InvalidArgument, Unavailable

PROD = Context(name="prod", server="https://fleet.example", token="prods", ca_pem="PEM", scope="/tenants/a")


@pytest.fixture(autouse=True)
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContextFile:
    """One context, `prod`, in an empty folder, where no server of anybody's is found."""
    for name in ("FLEETPLANE_CONTEXT", "FLEETPLANE_SERVER", "FLEETPLANE_DATA_DIR", "FLEETPLANE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLEETPLANE_CONTEXTS", str(tmp_path / "contexts.json"))
    monkeypatch.setattr(local, "listening", lambda: iter(()))
    monkeypatch.chdir(tmp_path)
    file = ContextFile.default()
    with file.changing() as held:
        file.write(held.with_context(PROD))
    return file


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[list[Path]]:
    """Two folders with a socket that somebody listens at, and one where nobody does."""
    with ExitStack() as stack:
        made = []
        for name in ("one", "two", "left behind"):
            path = tmp_path / name / local.SOCKET
            path.parent.mkdir()
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.bind(str(path))
            if name != "left behind":
                one.listen()
            made.append(path)
        yield made


def used(file: ContextFile, name: str) -> None:
    with file.changing() as held:
        file.write(held.using(name))


def test_the_current_context_is_meant_when_nobody_says(contexts: ContextFile) -> None:
    used(contexts, "prod")
    found = resolve(Place())
    assert (found.server, found.token, found.ca_pem, found.scope) == (
        "https://fleet.example",
        "prods",
        "PEM",
        "/tenants/a",
    )
    assert is_remote(Place())


def test_a_named_context_is_meant_before_the_current_one() -> None:
    assert resolve(Place(context="prod")).server == "https://fleet.example"
    assert not is_remote(Place())


def test_the_environment_names_a_context_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETPLANE_CONTEXT", "prod")
    assert resolve(Place()).context == "prod"


def test_an_address_takes_no_token_from_a_context(contexts: ContextFile) -> None:
    used(contexts, "prod")
    with pytest.raises(InvalidArgument, match="needs a token"):
        resolve(Place(server="https://elsewhere"))


def test_a_token_that_is_given_stands_beside_the_contexts_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETPLANE_TOKEN", "mine")
    found = resolve(Place(context="prod"))
    assert (found.server, found.token) == ("https://fleet.example", "mine")


@pytest.mark.parametrize(
    "place",
    [
        Place(context="prod", server="https://x"),
        Place(context="prod", data_dir=Path()),
        Place(server="x", data_dir=Path()),
    ],
)
def test_two_answers_to_which_server_are_refused(place: Place) -> None:
    with pytest.raises(InvalidArgument, match="give one"):
        resolve(place)


def test_what_is_said_wins_over_the_environment() -> None:
    variables = {"FLEETPLANE_SERVER": "https://x", "FLEETPLANE_TOKEN": "t", "FLEETPLANE_DATA_DIR": "/d"}
    assert completed(Place(context="prod"), variables).server == ""
    here = completed(Place(data_dir=Path("/here")), variables)
    assert (here.server, here.token, here.data_dir) == ("", "", Path("/here"))
    assert completed(Place(), variables).server == "https://x"


def test_the_owners_socket_is_not_looked_for_elsewhere(contexts: ContextFile) -> None:
    used(contexts, "prod")
    with pytest.raises(InvalidArgument, match="prod is elsewhere"):
        owner_directory(Place())
    assert owner_directory(Place(data_dir=Path("/d"))) == Path("/d")
    assert owner_directory(Place(context="local")) == local.DATA_DIR


def test_a_server_that_does_not_run_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="no server listens"):
        resolve(Place())


def test_the_kernel_tells_where_somebody_listens(sockets: list[Path]) -> None:
    # Of the real table; the name in this module was replaced by the fixture above.
    told = set(local.owned(_listening())) & set(sockets)
    assert told == set(sockets[:2])


def _listening() -> Iterator[Path]:
    import importlib.util

    spec = importlib.util.find_spec("fleetplane.client.local")
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return iter(list(fresh.listening()))


def test_the_one_server_that_runs_is_found(sockets: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "listening", lambda: iter(sockets[:1]))
    assert resolve(Place()).socket == sockets[0]


def test_of_several_servers_none_is_taken_by_chance(
    sockets: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "listening", lambda: iter(sockets[:2]))
    with pytest.raises(Conflict, match="2 servers of yours run"):
        resolve(Place())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_socket_of_another_user_is_nobodys_word(
    sockets: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(sockets[0], 12345, 12345)
    monkeypatch.setattr(local, "listening", lambda: iter(sockets[:1]))
    with pytest.raises(Unavailable):
        resolve(Place())
