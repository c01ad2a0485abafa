"""`fleetplane instances` against a real server in this process, over its socket and over TLS."""

from __future__ import annotations

import io
import json
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from support.instances.operator_rig import OTHER, TENANT, document
from support.instances.operator_server import Server, running
from support.shared.cli_runner import Invoke

from fleetplane.domains.instances import credentials
from fleetplane.domains.instances.cli import view, watch
from fleetplane.domains.instances.cli.watch import follow
from fleetplane.domains.instances.credentials import ClientRole
from fleetplane.domains.instances.kinds import OPERATOR
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.kernel.freeze import FREEZE
from fleetplane.kernel.identity.certificates import peer_identity
from fleetplane.kernel.reconcile import Explanation, Reason


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "s"
    folder.mkdir()
    with running(folder) as server:
        yield server


@pytest.fixture
def here(server: Server) -> list[str]:
    """Options of the server's owner."""
    return ["--data-dir", str(server.rig.folder)]


@pytest.fixture
def mine(here: list[str]) -> list[str]:
    return [*here, "--tenant", TENANT]


# Groups.


def test_groups_are_listed_for_people(invoke: Invoke, mine: list[str]) -> None:
    outcome = invoke("instances", "groups", *mine)
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["GROUP", "SIZE", "ACTUAL", "TEMPLATE", "TYPE", "POOL", "CONFIGURED", "VARS"]
    assert [line.split()[0] for line in lines[1:]] == ["api", "web"]


def test_groups_are_listed_for_programs(invoke: Invoke, mine: list[str]) -> None:
    found = json.loads(invoke("instances", "groups", *mine, "-o", "json").out)
    assert [(group["key"], group["size"], group["actual_size"]) for group in found] == [
        ("api", 1, 0),
        ("web", 2, 0),
    ]
    assert yaml.safe_load(invoke("instances", "groups", *mine, "-o", "yaml").out) == found


def test_a_tenant_without_groups_is_told_so(invoke: Invoke, here: list[str]) -> None:
    outcome = invoke("instances", "groups", *here)
    assert (outcome.code, outcome.out) == (0, "")
    assert "No groups" in outcome.err


def test_scaling_changes_the_size_and_nothing_else(invoke: Invoke, server: Server, mine: list[str]) -> None:
    outcome = invoke("instances", "scale", "api", "4", *mine)
    assert (outcome.code, outcome.out) == (0, "api scaled from 1 to 4\n")
    view = server.rig.groups.view(TENANT, "api")
    assert view is not None
    assert (view.group.size, view.group.instance_type) == (4, "m5")
    assert (TENANT, "api") in server.rig.looked


def test_scaling_what_is_not_there_makes_nothing(invoke: Invoke, server: Server, mine: list[str]) -> None:
    outcome = invoke("instances", "scale", "wbe", "4", *mine)
    assert outcome.code == 4
    assert "there are: api, web" in outcome.err
    assert server.rig.groups.view(TENANT, "wbe") is None


@pytest.mark.parametrize("size", ["-1", "100001", "many"])
def test_a_size_is_a_number_of_machines(invoke: Invoke, mine: list[str], size: str) -> None:
    assert invoke("instances", "scale", *mine, "--", "api", size).code == 2


def test_scaling_can_wait_for_the_instances(invoke: Invoke, server: Server, mine: list[str]) -> None:
    server.run(server.rig.add("api"))
    outcome = invoke("instances", "scale", "api", "1", "--wait", *mine)
    assert (outcome.code, outcome.out.splitlines()[-1]) == (0, "api has 1 instances")


def test_waiting_in_vain_is_a_timeout(invoke: Invoke, mine: list[str]) -> None:
    outcome = invoke("instances", "scale", "api", "3", "--wait", *mine, "--timeout", "5s")
    assert outcome.code == 124
    assert "0 of 3 instances" in outcome.err


# Who asks.


@pytest.mark.parametrize("kind", ["p256", "ed25519"])
def test_an_operator_with_its_identity_folder_needs_no_socket(
    invoke: Invoke, server: Server, tmp_path: Path, kind: str
) -> None:
    files = server.rig.identity(tmp_path / "id", tenant=OTHER, kind=kind)
    outcome = invoke(
        "instances", "groups", "--address", server.rig.address, "--identity-dir", str(files), "-o", "json"
    )
    assert [group["key"] for group in json.loads(outcome.out)] == ["secret"]


def test_a_certificate_whose_half_life_is_over_is_renewed_on_the_way(
    invoke: Invoke, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = server.rig.identity(tmp_path / "id", tenant=OTHER)
    asked = ("instances", "groups", "--address", server.rig.address, "--identity-dir", str(files))
    before = (files / "identity.crt").read_bytes()
    assert invoke(*asked).code == 0
    assert (files / "identity.crt").read_bytes() == before, "it is not due yet"

    monkeypatch.setattr("fleetplane.cli.clients.identity_files.RENEWAL_SHARE", 0.0)
    assert invoke(*asked).code == 0
    renewed = (files / "identity.crt").read_bytes()
    assert renewed != before
    monkeypatch.undo()
    assert invoke(*asked).code == 0, "what was renewed lets it in"


def test_an_address_without_an_identity_is_a_usage_error(invoke: Invoke) -> None:
    outcome = invoke("instances", "groups", "--address", "127.0.0.1:1")
    assert outcome.code == 2
    assert "--identity-dir" in outcome.err


def test_an_identity_that_lacks_a_file_says_which(invoke: Invoke, tmp_path: Path) -> None:
    outcome = invoke("instances", "groups", "--address", "127.0.0.1:1", "--identity-dir", str(tmp_path))
    assert outcome.code == 4
    assert "ca.crt" in outcome.err


def test_a_server_that_does_not_run_is_said_to_be_unavailable(invoke: Invoke, tmp_path: Path) -> None:
    outcome = invoke("instances", "groups", "--data-dir", str(tmp_path))
    assert outcome.code == 8
    assert "admin.sock" in outcome.err


def test_an_agents_certificate_is_denied(invoke: Invoke, server: Server, tmp_path: Path) -> None:
    files = server.rig.identity(tmp_path / "id", role=ClientRole.AGENT)
    outcome = invoke("instances", "groups", "--address", server.rig.address, "--identity-dir", str(files))
    assert outcome.code == 5


def test_the_owners_commands_leave_one_record_however_many_they_are(
    invoke: Invoke, server: Server, mine: list[str]
) -> None:
    for _ in range(3):
        invoke("instances", "groups", *mine)
    assert [record.name for record in server.rig.store.list(OPERATOR)] == ["local"]


def test_an_identity_is_made_for_its_owners_eyes_only_and_works(
    invoke: Invoke, server: Server, here: list[str], tmp_path: Path
) -> None:
    files = tmp_path / "operator"
    made = invoke(
        "instances",
        "operator-identity",
        *here,
        "--tenant",
        TENANT,
        "--output-dir",
        str(files),
        "--life",
        "48h",
    )
    assert made.code == 0
    names = {path.name: stat.S_IMODE(path.stat().st_mode) for path in files.iterdir()}
    assert names == dict.fromkeys(("ca.crt", "identity.crt", "identity.key", "identity.pub"), 0o600)
    identity = peer_identity((files / "identity.crt").read_bytes())
    assert identity.common_name.startswith("opr")
    assert identity.organizations == (TENANT,)
    assert 47 < (identity.not_after.timestamp() - identity.not_before.timestamp()) / 3600 < 49
    there = ["--address", server.rig.address, "--identity-dir", str(files)]
    assert invoke("instances", "groups", *there).code == 0


def test_an_identity_that_is_there_is_left_alone(
    invoke: Invoke, server: Server, here: list[str], tmp_path: Path
) -> None:
    files = server.rig.identity(tmp_path / "operator")
    before = (files / "identity.key").read_bytes()
    outcome = invoke("instances", "operator-identity", *here, "--output-dir", str(files))
    assert outcome.code == 6
    assert (files / "identity.key").read_bytes() == before


def test_a_nonce_is_printed_alone_and_lets_an_operator_register(
    invoke: Invoke, server: Server, mine: list[str]
) -> None:
    outcome = invoke("instances", "nonce", *mine, "--expiry", "5m")
    claims = credentials.read_nonce(server.rig.nonces, outcome.out.strip(), role=ClientRole.OPERATOR)
    assert (claims["sub"], claims["cluster_id"], claims["tenant"]) == ("lab", "lab", TENANT)
    assert TENANT in outcome.err


def test_a_nonce_in_a_file_is_for_its_owner_only(invoke: Invoke, mine: list[str], tmp_path: Path) -> None:
    file = tmp_path / "nonce.jwt"
    outcome = invoke("instances", "nonce", *mine, "--output", str(file))
    assert (outcome.code, outcome.out) == (0, "")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().count(".") == 2


def test_a_tenant_that_cannot_be_one_is_refused(invoke: Invoke, here: list[str]) -> None:
    assert invoke("instances", "nonce", *here, "--tenant", "Not Me").code == 2


# Instances.


def test_instances_are_listed_across_tenants_and_by_group(
    invoke: Invoke, server: Server, here: list[str]
) -> None:
    web = server.run(server.rig.add("web", provider="pm-1"))
    secret = server.run(server.rig.add("secret", tenant=OTHER, on_demand=True))
    found = json.loads(invoke("instances", "list", *here, "-o", "json").out)
    assert {(entry["instance_id"], entry["tenant"], entry["state"]) for entry in found} == {
        (web.name, TENANT, "registered"),
        (secret.name, OTHER, "registered"),
    }
    only = invoke("instances", "list", *here, "--tenant", OTHER, "--group", "secret").out.splitlines()
    assert len(only) == 2
    assert "secret (on demand)" in only[1]


def test_instances_that_are_gone_are_listed_only_on_request(
    invoke: Invoke, server: Server, here: list[str]
) -> None:
    gone = server.run(server.rig.add("web"))
    server.run(server.rig.change(gone, deleted_at_ns=1))
    assert json.loads(invoke("instances", "list", *here, "-o", "json").out) == []
    assert gone.name in invoke("instances", "list", *here, "--all").out


def test_an_instance_is_drained_by_name(invoke: Invoke, server: Server, here: list[str]) -> None:
    instance = server.run(server.rig.add("web"))
    outcome = invoke("instances", "drain", instance.name, *here, "--within", "1h")
    assert outcome.code == 0
    assert "drains (requested)" in outcome.out
    found = server.rig.instances.get(TENANT, instance.name)
    assert rules.state(found) is rules.State.DRAINING
    assert found.status is not None
    assert found.status.drain is not None
    assert found.status.drain.delete_at_ns - found.status.drain.started_at_ns == 3600 * 10**9
    assert found.status.drain.replace


def test_a_drain_takes_the_time_of_its_group_or_none(invoke: Invoke, server: Server, here: list[str]) -> None:
    first, second = server.run(server.rig.add("web")), server.run(server.rig.add("web"))
    invoke("instances", "drain", first.name, *here)
    invoke("instances", "drain", second.name, *here, "--now")
    spans = []
    for name in (first.name, second.name):
        status = server.rig.instances.get(TENANT, name).status
        assert status is not None
        assert status.drain is not None
        spans.append((status.drain.delete_at_ns - status.drain.started_at_ns) / 1e9)
    assert spans == [300.0, 0.0]


def test_draining_what_is_gone_or_never_was_is_refused(
    invoke: Invoke, server: Server, here: list[str]
) -> None:
    assert invoke("instances", "drain", "nobody", *here).code == 4
    gone = server.run(server.rig.add("web"))
    server.run(server.rig.change(gone, deleting_at_ns=1))
    assert invoke("instances", "drain", gone.name, *here).code == 6


# Freezing.


def test_a_freeze_holds_for_its_scope_until_it_is_lifted(
    invoke: Invoke, server: Server, here: list[str]
) -> None:
    scope = ["--tenant", TENANT, "--group", "web"]
    outcome = invoke("instances", "freeze", *here, *scope, "--reason", "moving house", "--for", "1h")
    assert outcome.code == 0
    assert f"tenant/{TENANT}/group/web is frozen until 2" in outcome.out
    (held,) = server.rig.store.list(FREEZE)
    assert (held.scope, held.spec.reason, held.spec.actor) == (
        f"tenant/{TENANT}/group/web",
        "moving house",
        "local",
    )
    listed = json.loads(invoke("instances", "freezes", *here, "-o", "json").out)
    assert [entry["reason"] for entry in listed] == ["moving house"]
    assert "moving house" in invoke("instances", "freezes", *here).out
    assert invoke("instances", "unfreeze", *here, "--tenant", TENANT).code == 4
    assert invoke("instances", "unfreeze", *here, *scope).code == 0
    assert not server.rig.store.list(FREEZE)


def test_everything_is_frozen_when_no_scope_is_given(invoke: Invoke, server: Server, here: list[str]) -> None:
    assert "everything is frozen until lifted" in invoke("instances", "freeze", *here, "--reason", "x").out
    assert [held.scope for held in server.rig.store.list(FREEZE)] == [""]


@pytest.mark.parametrize(
    "scope",
    [
        ["--group", "web"],
        ["--tenant", "Not Me"],
        ["--tenant", "a/group/b"],
        ["--tenant", "a", "--group", "B"],
    ],
)
def test_a_scope_that_would_freeze_nothing_is_refused(
    invoke: Invoke, server: Server, here: list[str], scope: list[str]
) -> None:
    assert invoke("instances", "freeze", *here, *scope, "--reason", "x").code == 2
    assert not server.rig.store.list(FREEZE)


def test_a_freeze_needs_a_reason(invoke: Invoke, here: list[str]) -> None:
    assert invoke("instances", "freeze", *here).code == 2


# Configuration, secrets, explanations.


def test_the_configuration_in_force_is_shown_and_refreshed(
    invoke: Invoke, server: Server, mine: list[str]
) -> None:
    status = json.loads(invoke("instances", "config", "status", *mine, "-o", "json").out)
    assert status["etag"] in invoke("instances", "config", "refresh", *mine).out
    changed = document()
    changed["groups"][TENANT]["web"]["size"] = 6
    server.run(server.rig.configure(changed))
    refreshed = json.loads(invoke("instances", "config", "refresh", *mine, "-o", "json").out)
    assert (refreshed["updated"], refreshed["prev_etag"]) == (True, status["etag"])
    assert refreshed["etag"] in invoke("instances", "config", "status", *mine).out


def test_a_refused_configuration_is_shown_with_its_line(
    invoke: Invoke, server: Server, mine: list[str]
) -> None:
    server.run(server.rig.configure("{\n\n  nonsense"))
    outcome = invoke("instances", "config", "refresh", *mine)
    assert outcome.code == 2
    assert "config.jsonc:3:" in outcome.err


def test_a_document_is_still_validated_without_a_server(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "config.jsonc"
    file.write_text(json.dumps(document()))
    assert invoke("instances", "config", "validate", str(file)).code == 0


def test_a_secret_is_kept_encrypted(
    invoke: Invoke, server: Server, here: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"from a file")
    assert invoke("instances", "secret", "put", "one", str(file), *here).code == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from stdin")))
    assert invoke("instances", "secret", "put", "two", *here).code == 0
    rig = server.rig
    assert server.run(rig.secrets.get("one", tenant=TENANT, written_out=True)) == b"from a file"
    assert server.run(rig.secrets.get("two", tenant=TENANT, written_out=True)) == b"from stdin"
    stored = server.run(rig.objects.get("cluster/secret/one"))
    assert stored is not None
    assert b"from a file" not in stored.body


@pytest.mark.parametrize(
    ("name", "content"), [("../escape", b"x"), ("empty", b""), ("big", b"x" * (1024 * 1024 + 1))]
)
def test_a_secret_with_a_bad_name_or_size_is_refused(
    invoke: Invoke, here: list[str], tmp_path: Path, name: str, content: bytes
) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    assert invoke("instances", "secret", "put", name, str(file), *here).code == 2


class Controller:
    name = "instances/groups"

    def explain(self, key: str) -> Explanation | None:
        return next((found for found in self.explanations() if found.key == key), None)

    def explanations(self) -> Iterator[Explanation]:
        reason = Reason(code="RATE_LIMITED", message="next creation in 3.0 s", subject="wkr1")
        yield Explanation(
            key=f"{TENANT}/web", at_ns=1, reasons=(reason,), failures=2, last_error="the cloud is full"
        )
        yield Explanation(key=f"{TENANT}/api", at_ns=1, reasons=())


@pytest.fixture
def without_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rig has no resource API, whose kinds would be asked first whether TENANT is one of them."""
    monkeypatch.setattr("fleetplane.cli.explain._show_object", lambda *_, **__: False)


@pytest.mark.usefixtures("without_objects")
def test_whoever_does_nothing_says_why(invoke: Invoke, server: Server, here: list[str]) -> None:
    server.rig.explanations.register(Controller())
    outcome = invoke("explain", f"{TENANT}/web", *here)
    assert outcome.code == 0
    assert "wkr1: next creation in 3.0 s" in outcome.out
    assert "the cloud is full (2 in a row)" in outcome.out
    assert "everything is as it should be" in invoke("explain", f"{TENANT}/api", *here).out
    both = json.loads(invoke("explain", *here, "-o", "json").out)
    assert [finding["key"] for finding in both] == [f"{TENANT}/web", f"{TENANT}/api"]
    assert both[0]["reasons"][0]["code"] == "RATE_LIMITED"


@pytest.mark.usefixtures("without_objects")
def test_what_nobody_knows_cannot_be_explained(invoke: Invoke, here: list[str]) -> None:
    assert invoke("explain", "no/body", *here).code == 4


# Watching.


@pytest.fixture
def until(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[str]], bool]], None]:
    """Ends a watch as soon as what was printed is enough, however long that takes."""

    def end(is_enough: Callable[[list[str]], bool]) -> None:
        def followed(*given: Any, **options: Any) -> Iterator[Any]:
            lines: list[str] = []
            events: Any = follow(*given, **options)
            with closing(events):
                for event in events:
                    yield event
                    lines.append(view.event_line(event))
                    if is_enough(lines):
                        return

        monkeypatch.setattr(watch, "follow", followed)

    return end


def test_a_watch_tells_groups_instances_and_errors_line_by_line(
    invoke: Invoke, server: Server, mine: list[str], until: Callable[[Callable[[list[str]], bool]], None]
) -> None:
    def happen() -> None:
        rig = server.rig
        for _ in range(6000):
            if rig.service.open_watches == 3:
                break
            threading.Event().wait(0.01)
        instance = server.run(rig.add("web", provider="pm-1"))
        server.run(rig.drain(instance, "unhealthy"))
        server.tell(TENANT, "web", "", "the cloud\x1b[31m is full")

    def is_told(lines: list[str]) -> bool:
        return (
            any(line.startswith("group") and "actual=1" in line for line in lines)
            and any(line.startswith("instance  pending_deletion") and "unhealthy" in line for line in lines)
            and any(line.startswith("error     web  the cloud") for line in lines)
        )

    until(is_told)
    doing = threading.Thread(target=happen)
    doing.start()
    outcome = invoke("instances", "watch", *mine, "--for", "60s")
    doing.join()
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    groups = [line.split() for line in lines if line.startswith("group")]  # three streams keep no order
    assert groups[0] == ["group", "UPSERT", "api", "size=1", "actual=0"]
    assert is_told(lines), outcome
    assert "\x1b" not in outcome.out


def until_scaled(server: Server, until: Callable[[Callable[[list[str]], bool]], None]) -> None:
    """What is there is two groups; a change of one of them comes right after that."""

    def is_told(lines: list[str]) -> bool:
        if len(lines) == 2:
            server.run(scaled(server, 6))
        return "size=6" in lines[-1]

    until(is_told)


async def scaled(server: Server, size: int) -> None:
    await (await server.rig.operator()).upsert("web", size=size)


def test_a_watch_for_programs_is_one_object_a_line(
    invoke: Invoke, server: Server, mine: list[str], until: Callable[[Callable[[list[str]], bool]], None]
) -> None:
    until_scaled(server, until)
    outcome = invoke("instances", "watch", "groups", *mine, "-o", "json", "--for", "60s")
    events = [json.loads(line) for line in outcome.out.splitlines()]
    assert [(event["kind"], event["type"], event["object"]["key"]) for event in events] == [
        ("group", "UPSERT", "api"),
        ("group", "UPSERT", "web"),
        ("group", "UPSERT", "web"),
    ]
    assert [event["object"]["size"] for event in events] == [1, 2, 6]


def test_a_watch_understands_the_first_generation_of_group_events(
    invoke: Invoke, tmp_path: Path, until: Callable[[Callable[[list[str]], bool]], None]
) -> None:
    with running(tmp_path, generations={TENANT: "first"}) as server:
        until_scaled(server, until)
        mine = ["--data-dir", str(server.rig.folder), "--tenant", TENANT]
        outcome = invoke("instances", "watch", "groups", *mine, "-o", "json", "--for", "60s")
    assert [json.loads(line)["type"] for line in outcome.out.splitlines()] == ["UPSERT"] * 3


def test_a_certificate_made_for_a_command_is_short_lived(
    invoke: Invoke, server: Server, mine: list[str]
) -> None:
    invoke("instances", "groups", *mine)
    (record,) = server.rig.store.list(OPERATOR)
    authority = x509.load_pem_x509_certificate(server.rig.authority.certificate_pem)
    assert authority.not_valid_after_utc.timestamp() * 1e9 > record.spec.expires_at_ns
    assert (record.spec.expires_at_ns - record.spec.registered_at_ns) / 3600e9 <= 1.0
