"""Single instances, tenants, settings of groups and authorities, from the command line."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from support.instances.operator_rig import OTHER, TENANT, document
from support.instances.operator_server import SECONDS, Server, running
from support.shared.cli_runner import Invoke

from fleetplane.domains.instances.kinds import GROUP
from fleetplane.domains.instances.rules import decide as rules


def with_listener() -> dict[str, Any]:
    """The usual document, with a load balancer before one of its groups."""
    wanted = document(nat={})
    place = {"arn": "arn:x", "listener_port": 443, "target_port": 8443, "proxy_port": 9443}
    wanted["load_balancers"] = {"front": {"provider": "aws", "target_groups": [place]}}
    wanted["shard"]["infra"]["provider"] = "aws"
    wanted["groups"][TENANT]["web"]["load_balancers"] = ["front"]
    return wanted


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "s"
    folder.mkdir()
    with running(folder) as server:
        yield server


@pytest.fixture
def here(server: Server) -> list[str]:
    return ["--data-dir", str(server.rig.folder)]


@pytest.fixture
def mine(here: list[str]) -> list[str]:
    return [*here, "--tenant", TENANT]


# Instances.


def test_an_instance_is_made_on_demand_and_its_id_is_all_of_stdout(
    invoke: Invoke, server: Server, mine: list[str]
) -> None:
    done = invoke("instances", "create", "web", "--type", "m9", "--var", "A=1", "--var", "B=x=y", *mine)
    assert (done.code, done.err) == (0, "pending in web\n")
    [instance] = server.rig.instances.all(TENANT)
    assert done.out == f"{instance.name}\n"
    assert (instance.spec.on_demand, instance.spec.instance_type) == (True, "m9")
    assert instance.spec.vars == {"A": "1", "B": "x=y"}
    again = invoke("instances", "create", "web", "--id", instance.name, "-o", "json", *mine)
    assert json.loads(again.out) == {"instance_id": instance.name, "status": "pending"}
    assert len(server.rig.instances.all(TENANT)) == 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nowhere"], 4),
        (["web", "--id", "no-id"], 2),
        (["web", "--var", "novalue"], 2),
        (["web", "--var", "=x"], 2),
        ([], 2),
    ],
)
def test_an_instance_that_cannot_be_made_is_refused(
    invoke: Invoke, server: Server, mine: list[str], arguments: list[str], code: int
) -> None:
    assert invoke("instances", "create", *arguments, *mine).code == code
    assert not server.rig.instances.all(TENANT)


def test_the_status_of_one_instance_is_shown(invoke: Invoke, server: Server, mine: list[str]) -> None:
    instance = server.run(server.rig.add())
    server.rig.words[instance.name] = "repairing"
    shown = invoke("instances", "status", instance.name, *mine)
    assert shown.code == 0
    assert "repairing" in shown.out
    found = json.loads(invoke("instances", "status", instance.name, "-o", "json", *mine).out)
    assert (found["status"], found["tenant"], found["provider_instance_id"]) == ("repairing", TENANT, "pm-1")
    assert invoke("instances", "status", "wkr" + "0" * 26, *mine).code == 4


def test_an_instance_is_deleted_at_once(invoke: Invoke, server: Server, mine: list[str]) -> None:
    instance = server.run(server.rig.add())
    gone = invoke("instances", "delete", instance.name, *mine)
    assert (gone.code, gone.out) == (0, f"{instance.name} is deleting\n")
    assert rules.state(server.rig.instances.get(TENANT, instance.name)) is rules.State.DELETING
    again = invoke("instances", "delete", instance.name, "-o", "json", *mine)
    assert json.loads(again.out) == {"status": "deleting"}
    assert invoke("instances", "delete", "wkr" + "0" * 26, *mine).code == 4


def test_another_tenants_instance_is_not_found(invoke: Invoke, server: Server, mine: list[str]) -> None:
    instance = server.run(server.rig.add("secret", tenant=OTHER))
    for verb in ("status", "delete"):
        assert invoke("instances", verb, instance.name, *mine).code == 4
    assert rules.state(server.rig.instances.get(OTHER, instance.name)) is rules.State.REGISTERED


@contextmanager
def far_away(address: str, seconds: float) -> Iterator[str]:
    """Another address of the same place, to which the first bytes of every connection take long."""
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def pass_on(source: socket.socket, target: socket.socket) -> None:
            with suppress(OSError):
                while data := source.recv(65536):
                    target.sendall(data)
            for one in (source, target):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

        def relay() -> None:
            near = stack.enter_context(listening.accept()[0])
            time.sleep(seconds)
            far = stack.enter_context(socket.create_connection((host, int(port))))
            back = threading.Thread(target=pass_on, args=(far, near))
            back.start()
            pass_on(near, far)
            back.join()

        relaying = threading.Thread(target=relay)
        relaying.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        relaying.join(SECONDS)


def test_a_server_that_is_far_away_is_reached(invoke: Invoke, server: Server, tmp_path: Path) -> None:
    folder = server.rig.identity(tmp_path / "operator")
    with far_away(server.rig.address, 0.5) as address:
        found = invoke(
            "instances", "tenant", "--tenant", TENANT, "--address", address, "--identity-dir", str(folder)
        )
    assert (found.code, found.out) == (0, f"{TENANT} is awake\n"), found.err


# Tenants.


def test_a_tenant_sleeps_and_is_woken(invoke: Invoke, mine: list[str]) -> None:
    slept = invoke("instances", "sleep", *mine)
    assert (slept.code, slept.out) == (0, f"{TENANT} sleeps until woken\n")
    timed = invoke("instances", "sleep", "--for", "2h", *mine)
    assert timed.out.startswith(f"{TENANT} sleeps until 2")
    assert invoke("instances", "tenant", *mine).out == timed.out
    woken = invoke("instances", "wake", *mine)
    assert (woken.code, woken.out) == (0, f"{TENANT} is awake\n")
    assert invoke("instances", "wake", *mine).out == f"{TENANT} was awake already\n"
    assert invoke("instances", "tenant", *mine).out == f"{TENANT} is awake\n"


def test_sleep_and_wake_for_programs(invoke: Invoke, mine: list[str]) -> None:
    slept = json.loads(invoke("instances", "sleep", "--for", "1h", "-o", "json", *mine).out)
    assert (slept["result"], slept["status"]) == ("RESULT_SLEPT", "TENANT_SLEEP_STATUS_ASLEEP")
    assert "wake_at" in slept
    found = yaml.safe_load(invoke("instances", "tenant", "-o", "yaml", *mine).out)
    assert (found["status"], found["wake_at"]) == ("TENANT_SLEEP_STATUS_ASLEEP", slept["wake_at"])
    woken = json.loads(invoke("instances", "wake", "-o", "json", *mine).out)
    assert woken["result"] == "RESULT_WOKE"


def test_a_busy_tenant_stays_awake_and_that_is_a_conflict(invoke: Invoke, mine: list[str]) -> None:
    assert invoke("instances", "create", "web", *mine).code == 0
    busy = invoke("instances", "sleep", *mine)
    assert (busy.code, busy.out) == (6, "")
    assert "on demand" in busy.err


def test_listeners_of_a_tenant_are_shown_with_how_long_they_are_idle(invoke: Invoke, tmp_path: Path) -> None:
    folder = tmp_path / "l"
    folder.mkdir()
    with running(folder, wanted=with_listener()) as server:
        mine = ["--data-dir", str(folder), "--tenant", TENANT]
        shown = invoke("instances", "tenant", *mine)
        assert shown.err == f"{TENANT} is awake\n"
        assert [line.split()[:2] for line in shown.out.splitlines()] == [
            ["LISTENER", "AVAILABLE"],
            ["front:443", "no"],
        ]
        server.run(server.rig.add())
        found = json.loads(invoke("instances", "tenant", "-o", "json", *mine).out)
        [listener] = found["listeners"]
        assert (listener["listener"], listener["available"]) == ("front:443", True)


# Groups.


def test_variables_and_arguments_are_set_and_unset(invoke: Invoke, server: Server, mine: list[str]) -> None:
    done = invoke(
        "instances",
        "set",
        "web",
        "--var",
        "A=1",
        "--arg",
        "ImageId=ami-1",
        "--size",
        "4",
        "--type",
        "m9",
        "-o",
        "json",
        *mine,
    )
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["vars"], found["args"], found["size"]) == ({"A": "1"}, {"ImageId": "ami-1"}, 4)
    shown = invoke("instances", "set", "web", "--unset-var", "A", "--unset-arg", "ImageId", *mine)
    assert shown.out.splitlines()[1].split() == ["web", "4", "m9", "-", "-"]
    assert (TENANT, "web") in server.rig.looked


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["web"], 2),
        (["web", "--unset-var", "Colour"], 4),
        (["web", "--arg", "A={{ .Broken"], 2),
        (["nowhere", "--size", "1"], 4),
        (["web", "--size", "-1"], 2),
    ],
)
def test_settings_that_cannot_be_are_refused(
    invoke: Invoke, server: Server, mine: list[str], arguments: list[str], code: int
) -> None:
    assert invoke("instances", "set", *arguments, *mine).code == code
    assert not server.rig.store.list(GROUP)


# Authorities.


def test_the_authority_is_replaced_step_by_step_and_each_says_what_comes_next(
    invoke: Invoke, server: Server, here: list[str]
) -> None:
    first = invoke("instances", "ca", "status", *here)
    assert [line.split()[-5] for line in first.out.splitlines()[1:]] == ["signing"]
    assert first.err == ""

    rotated = invoke("instances", "ca", "rotate", *here)
    assert rotated.code == 0
    assert [line.split()[-5] for line in rotated.out.splitlines()[1:]] == ["signing", "announced"]
    assert "ca switch" in rotated.err
    shown = invoke("instances", "ca", "show", *here)
    assert shown.out.encode() == server.rig.authority.trust_pem
    assert len(x509.load_pem_x509_certificates(shown.out.encode())) == 2
    others = invoke("instances", "ca", "show", "--workloads", *here).out.encode()
    assert "workload" in x509.load_pem_x509_certificates(others)[0].subject.rfc4514_string()

    switched = invoke("instances", "ca", "switch", *here)
    assert [line.split()[-5] for line in switched.out.splitlines()[1:]] == ["signing", "retiring"]
    assert "ca retire" in switched.err
    retired = invoke("instances", "ca", "retire", *here)
    assert (retired.code, retired.err) == (0, "")
    found = json.loads(invoke("instances", "ca", "status", "-o", "json", *here).out)
    assert (found["phase"], len(found["authorities"])) == ("steady", 1)
    assert found["trust_pem"].startswith("-----BEGIN CERTIFICATE-----")


def test_a_step_that_would_leave_someone_behind_is_a_conflict_unless_forced(
    invoke: Invoke, server: Server, here: list[str]
) -> None:
    instance = server.run(server.rig.add())
    assert invoke("instances", "ca", "retire", *here).code == 6
    rotated = invoke("instances", "ca", "rotate", *here)
    assert instance.name in rotated.err
    assert invoke("instances", "ca", "switch", *here).code == 0, "the old one vouches for the new one"
    refused = invoke("instances", "ca", "retire", *here)
    assert refused.code == 6
    assert instance.name in refused.err
    assert invoke("instances", "ca", "retire", "--force", *here).code == 0


def test_an_authority_is_exported_for_its_owner_alone_and_imported_again(
    invoke: Invoke, server: Server, here: list[str], tmp_path: Path
) -> None:
    kept = tmp_path / "authority.pem"
    before = server.rig.authority.key_id
    assert invoke("instances", "ca", "export", str(kept), *here).code == 0
    assert kept.stat().st_mode & 0o777 == 0o600
    assert invoke("instances", "ca", "export", str(kept), *here).code == 2, "no file is written over"
    assert invoke("instances", "ca", "import", str(kept), *here).code == 6, "it is trusted already"
    for step in ("rotate", "switch", "retire"):
        assert invoke("instances", "ca", step, *here).code == 0
    assert server.rig.authority.key_id != before
    for words in (("import", str(kept)), ("switch",), ("retire",)):
        assert invoke("instances", "ca", *words, *here).code == 0
    assert server.rig.authority.key_id == before
    half = tmp_path / "certificate.pem"
    half.write_bytes(server.rig.authority.trust_pem)
    refused = invoke("instances", "ca", "import", str(half), *here)
    assert refused.code == 2
    assert "1 certificates and 0 private keys" in refused.err


def test_the_key_of_nonces_is_replaced(invoke: Invoke, server: Server, here: list[str]) -> None:
    before = server.rig.nonces.kid
    done = invoke("instances", "rotate-nonce-key", *here)
    assert done.code == 0
    assert server.rig.nonces.kid in done.out
    assert server.rig.nonces.kid != before
