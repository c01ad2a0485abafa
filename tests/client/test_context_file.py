from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from fleetplane.client.contexts import LOCAL, Context, ContextFile, Contexts
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound

PROD = Context(name="prod", server="https://fleet.example", token="secret", ca_pem="PEM", scope="/tenants/a")


@pytest.fixture
def file(tmp_path: Path) -> ContextFile:
    return ContextFile(tmp_path / "deep" / "contexts.json")


def kept(file: ContextFile, *contexts: Context, current: str = LOCAL) -> None:
    with file.changing() as held:
        known = {one.name: one for one in contexts}
        file.write(replace(held, contexts={**held.contexts, **known}).using(current))


def test_contexts_come_back_as_they_were_kept(file: ContextFile) -> None:
    kept(file, PROD)
    assert file.read() == Contexts(contexts={"prod": PROD}, current=LOCAL)


def test_the_file_is_its_owners_alone_whatever_the_umask_says(file: ContextFile) -> None:
    before = os.umask(0)
    try:
        kept(file, PROD)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700


def test_without_a_file_the_server_on_this_machine_is_meant(file: ContextFile) -> None:
    assert file.read().current == LOCAL
    assert file.read().get(LOCAL).is_local


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_can_open_is_refused(file: ContextFile, mode: int) -> None:
    kept(file, PROD)
    file.path.chmod(mode)
    with pytest.raises(FailedPrecondition, match="others may open it"):
        file.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(file: ContextFile) -> None:
    kept(file, PROD)
    os.chown(file.path, 12345, 12345)
    with pytest.raises(FailedPrecondition, match="belongs to another user"):
        file.read()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b'{"contexts": 1}',
        b'{"contexts": {"a": 1}}',
        b'{"contexts":{"a":{"token":7}}}',
        b"\xff",
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_and_not_an_empty_one(
    file: ContextFile, content: bytes
) -> None:
    kept(file)
    file.path.write_bytes(content)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        file.read()


def test_a_pipe_in_the_files_place_is_refused_instead_of_waited_for(file: ContextFile) -> None:
    file.path.parent.mkdir()
    os.mkfifo(file.path, 0o600)
    with pytest.raises(FailedPrecondition, match="no ordinary file"):
        file.read()


def test_another_context_changes_nothing_about_the_current_one() -> None:
    contexts = Contexts().with_context(PROD)
    assert contexts.current == LOCAL
    assert contexts.using("prod").with_context(Context(name="lab", server="https://lab")).current == "prod"


def test_the_current_context_cannot_be_deleted() -> None:
    contexts = Contexts().with_context(PROD).using("prod")
    with pytest.raises(FailedPrecondition, match="current context"):
        contexts.without("prod")
    assert contexts.using(LOCAL).without("prod").contexts == {}


def test_a_context_that_is_gone_is_an_error_and_not_the_local_one() -> None:
    with pytest.raises(NotFound, match="prod"):
        Contexts(current="prod").get("prod")


@pytest.mark.parametrize("name", [LOCAL, "", "-x", "a/b", "a b", "x" * 101, "a\x1b[31m"])
def test_names_that_would_confuse_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument):
        Contexts().with_context(Context(name=name, server="https://x"))


def test_a_context_does_not_show_its_token() -> None:
    assert "secret" not in repr(Contexts().with_context(PROD))
