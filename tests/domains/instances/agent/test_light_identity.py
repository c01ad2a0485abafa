"""The folders of a running agent: the same answers as the whole ones, from processes that are soon gone."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from domains.instances.agent.agent_rig import Rig
from support.instances.instance_server_double import INSTANCE_ID
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.instances.agent.identity import light
from fleetplane.domains.instances.agent.identity.folder import IdentityFolder
from fleetplane.domains.instances.agent.identity.keys import KeyFolder
from fleetplane.domains.instances.agent.identity.light import LightIdentityFolder, LightKeyFolder
from fleetplane.domains.instances.agent.identity.steps import HeldCertificateState
from fleetplane.domains.instances.agent.root import make_instance_agent
from fleetplane.domains.instances.rules import files as file_rules
from fleetplane.kernel.errors import IntegrityError, SettingsError
from fleetplane.node.link import LinkLost
from fleetplane.node.short_lived import CallFailed, call_elsewhere

NOW = 1_800_000_000.0
CA, OTHER = ThrowawayCa(name="ours"), ThrowawayCa(name="others")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which functions were called elsewhere."""
    seen: list[str] = []

    def counted(function: Callable[..., Any], *args: Any) -> Any:
        seen.append(function.__name__)
        return call_elsewhere(function, *args)

    monkeypatch.setattr(light, "call_elsewhere", counted)
    return seen


def make(folder: Path) -> tuple[LightIdentityFolder, IdentityFolder]:
    return (
        LightIdentityFolder(folder, mode=0o600, instance_id=INSTANCE_ID),
        IdentityFolder(folder, mode=0o600),
    )


def test_an_enrolled_agent_looks_once_and_again_after_a_change(tmp_path: Path, calls: list[str]) -> None:
    small, whole = make(tmp_path)
    (tmp_path / "ca.crt").write_bytes(CA.pem)
    leaf = CA.client(whole.key().public_key(), INSTANCE_ID)
    whole.store_certificate(leaf, INSTANCE_ID)
    for _ in range(3):
        assert small.authority_pem() == CA.pem
        assert small.public_key_pem() == whole.public_key_pem()
        assert small.certificate_state(INSTANCE_ID, now=NOW) == whole.certificate_state(INSTANCE_ID, now=NOW)
        assert small.credentials() == whole.credentials()
        assert small.trust(CA.pem) is False
    assert calls == ["survey"]

    assert small.trust(CA.pem + OTHER.pem) is True
    assert small.credentials().authority_pem == CA.pem + OTHER.pem
    renewed = CA.client(whole.key().public_key(), INSTANCE_ID)
    small.store_certificate(renewed, INSTANCE_ID)
    assert small.credentials() == whole.credentials()
    assert small.credentials().certificate_pem == renewed
    assert calls == ["survey", "trust", "survey", "store_certificate", "survey"]


def test_a_folder_without_a_key_gets_one_and_no_certificate_of_others_is_kept(tmp_path: Path) -> None:
    small, whole = make(tmp_path)
    with pytest.raises(SettingsError, match="is missing"):
        small.authority_pem()
    (tmp_path / "ca.crt").write_bytes(CA.pem)
    assert small.certificate_state(INSTANCE_ID, now=NOW)[0] is HeldCertificateState.ABSENT
    assert small.public_key_pem() == whole.public_key_pem()
    with pytest.raises(IntegrityError, match="cannot use"):
        small.store_certificate(OTHER.client(whole.key().public_key(), INSTANCE_ID), INSTANCE_ID)
    assert not (tmp_path / "identity.crt").exists()
    (tmp_path / "identity.crt").write_bytes(OTHER.client(whole.key().public_key(), INSTANCE_ID))
    assert small.certificate_state(INSTANCE_ID, now=NOW) == whole.certificate_state(INSTANCE_ID, now=NOW)
    assert small.certificate_state(INSTANCE_ID, now=NOW)[0] is HeldCertificateState.FOREIGN


def test_keys_are_made_once_with_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    small, whole = LightKeyFolder(tmp_path, mode=0o640), KeyFolder(tmp_path, mode=0o640)
    made = small.public_keys(["one", "two"])
    assert made == small.public_keys(["one", "two"]) == whole.public_keys(["one", "two"])
    assert base64.b64decode(made["one"])
    assert (tmp_path / "one.key").stat().st_mode & 0o777 == 0o640


def test_only_files_that_need_it_are_looked_at_elsewhere(calls: list[str]) -> None:
    plain = {"a.env": b"A=1", "b.json": b"{", "c": b""}
    assert light.complaints(plain) == file_rules.complaints(plain)
    assert calls == []
    keys = {**plain, "d.crt": CA.pem, "e.key": b"x"}
    assert light.complaints(keys) == file_rules.complaints(keys)
    assert calls == ["complaints"]


async def test_a_machine_that_can_start_no_process_now_is_tried_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise CallFailed("no memory")

    monkeypatch.setattr(light, "call_elsewhere", failing)
    agent = make_instance_agent(rig.settings, structlog.get_logger(), is_light=True)
    with pytest.raises(LinkLost, match="no memory"):
        await agent._line()
