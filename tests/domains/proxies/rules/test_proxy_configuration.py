"""Versions of a workspace: one per change, per agent, compared, gone back to, forgotten."""

from __future__ import annotations

import asyncio
import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from support.proxies.proxy_api import HOST, UPSTREAM, Api, Json, rest_api

from fleetplane.domains.proxies.kinds.records import AGENT, CONFIG_PART, CONFIG_VERSION, workspace_scope
from fleetplane.domains.proxies.rules.configuration import AgentConfig
from fleetplane.domains.proxies.serving import workspaces as workspaces_module
from fleetplane.kernel.errors import NotFound


def pem_pair(*names: str, days: int = 30) -> tuple[str, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=60))
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode()


async def enrolled(api: Api, workspace: str, name: str, **labels: str) -> str:
    body = {"name": name, "labels": labels}
    return str((await api.admin.post(f"/workspaces/{workspace}/agents/tokens", body))["agent_id"])


def desired(api: Api, organization: str, workspace: str, agent: str) -> AgentConfig:
    found = api.store.get(AGENT, workspace_scope(organization, workspace), agent)
    assert found is not None
    return api.workspaces.desired(found)


async def version(api: Api, workspace: str) -> int:
    return int((await api.admin.get(f"/workspaces/{workspace}/configs"))["data"][0]["version"])


async def test_each_change_makes_one_version_and_what_changes_nothing_makes_none(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        below = f"/workspaces/{workspace}"
        assert await version(api, workspace) == 1
        upstream = await api.admin.post(f"{below}/upstreams", UPSTREAM)
        host = await api.admin.post(f"{below}/virtual-hosts", HOST)
        await api.admin.patch(f"/virtual-hosts/{host['id']}", {"name": "Another"})
        await api.admin.patch(f"/virtual-hosts/{host['id']}", {"name": "Another"})
        await api.admin.post(f"{below}/certificates", {"domain": "a.example.com"})
        await api.admin.call("PUT", f"{below}/settings", {"nginx_directives": {"server_tokens": "off"}})
        await api.admin.delete(f"/upstreams/{upstream['id']}")
        rows = (await api.admin.get(f"{below}/configs"))["data"]

    assert [(row["version"], row["cause"]) for row in rows] == [
        (6, "upstream.delete"),
        (5, "settings.update"),
        (4, "virtual_host.update"),
        (3, "virtual_host.create"),
        (2, "upstream.create"),
        (1, "workspace.create"),
    ]
    assert {row["actor"] for row in rows[:-1]} == {f"user/{api.admin.id}"}


async def test_an_agent_gets_what_targets_it_and_only_what_that_mentions(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        below = f"/workspaces/{workspace}"
        prod = await enrolled(api, workspace, "prod", env="production")
        staging = await enrolled(api, workspace, "staging", env="staging")
        one = await api.admin.post(f"{below}/upstreams", UPSTREAM)
        await api.admin.post(f"{below}/upstreams", {**UPSTREAM, "name": "unused"})
        host = await api.admin.post(
            f"{below}/virtual-hosts",
            {
                **HOST,
                "locations": [{"path": "/", "upstream_id": one["id"]}],
                "target_agents": {"type": "selector", "label_selector": "env=production"},
            },
        )

        got = desired(api, organization, workspace, prod)
        empty = desired(api, organization, workspace, staging)
        assert (set(got.virtual_hosts), set(got.upstreams)) == ({host["id"]}, {one["id"]})
        assert (empty.virtual_hosts, empty.upstreams) == ({}, {})
        assert got.version == empty.version == await version(api, workspace)

        await api.admin.patch(f"/agents/{prod}", {"labels": {"env": "staging"}})
        moved = desired(api, organization, workspace, prod)
        assert moved.version == got.version + 1, "a label that changes someone's share makes a version"
        assert moved.config_id == empty.config_id, "the same content has the same id"
        await api.admin.patch(f"/agents/{prod}", {"labels": {"env": "staging", "rack": "7"}})
        assert desired(api, organization, workspace, prod).version == moved.version


async def test_a_host_waits_for_its_certificate_and_the_key_never_comes_back(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        below = f"/workspaces/{workspace}"
        agent = await enrolled(api, workspace, "a")
        pending = await api.admin.post(f"{below}/certificates", {"domain": "example.com"})
        host = await api.admin.post(
            f"{below}/virtual-hosts",
            {
                **HOST,
                "listen_port": 443,
                "ssl_enabled": True,
                "ssl_certificate_id": pending["id"],
            },
        )
        assert desired(api, organization, workspace, agent).withheld == (host["id"],)

        chain, key = pem_pair("example.com", "*.example.org")
        body = {"certificate": chain, "private_key": key}
        answer = await api.admin.call("POST", f"{below}/certificates/import", body)
        imported = answer.json()
        assert (imported["status"], imported["provider"], imported["domain"]) == (
            "active",
            "imported",
            "example.com",
        )
        await api.admin.patch(f"/virtual-hosts/{host['id']}", {"ssl_certificate_id": imported["id"]})
        got = desired(api, organization, workspace, agent)

        assert got.withheld == ()
        part = got.certificates[imported["id"]]
        assert part.chain_pem == chain
        assert (await api.vault.private_key(imported["id"], part.fingerprint)).decode() == key
        secret = key.splitlines()[1]
        for path in (
            f"/certificates/{imported['id']}",
            f"{below}/certificates",
            f"{below}/export",
            f"/agents/{agent}/configs/{got.version}",
            f"{below}/configs/diff?from=1",
        ):
            assert secret not in (await api.admin.call("GET", path)).text, path
        await api.admin.patch(f"/virtual-hosts/{host['id']}", {"ssl_certificate_id": pending["id"]})
        await api.admin.delete(f"/certificates/{imported['id']}")
        with pytest.raises(NotFound):
            await api.vault.private_key(imported["id"], part.fingerprint)
    assert secret.encode() not in b"".join(path.read_bytes() for path in tmp_path.glob("p.db*"))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"certificate": "nonsense"}, "certificate"),
        ({"private_key": "nonsense"}, "private_key"),
        ({"private_key": pem_pair("x.example.com")[1]}, "private_key"),
        ({"certificate": pem_pair("x.example.com", days=-1)[0]}, "private_key"),
        ({"domain": "not a domain"}, "domain"),
    ],
)
async def test_a_certificate_that_does_not_fit_is_refused_at_its_field(
    tmp_path: Path, change: Json, field: str
) -> None:
    chain, key = pem_pair("example.com")
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        body = {"certificate": chain, "private_key": key, **change}
        found = await api.admin.faults("POST", f"/workspaces/{workspace}/certificates/import", body)
    assert [name for name, _ in found] == [field]


async def test_a_certificate_that_does_not_cover_a_name_is_only_warned_about(tmp_path: Path) -> None:
    chain, key = pem_pair("example.com", "*.example.org")
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        below = f"/workspaces/{workspace}"
        made = await api.admin.post(
            f"{below}/certificates/import", {"certificate": chain, "private_key": key}
        )
        body = {
            **HOST,
            "server_name": "example.com api.example.com a.example.org",
            "listen_port": 443,
            "ssl_enabled": True,
            "ssl_certificate_id": made["id"],
        }
        host = await api.admin.post(f"{below}/virtual-hosts", body)
        assert host["warnings"] == ["the certificate does not cover api.example.com"]
        assert "warnings" not in await api.admin.get(f"/virtual-hosts/{host['id']}")


async def test_two_versions_are_compared_object_by_object_and_field_by_field(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        below = f"/workspaces/{workspace}"
        upstream = await api.admin.post(f"{below}/upstreams", UPSTREAM)
        host = await api.admin.post(f"{below}/virtual-hosts", HOST)
        before = await version(api, workspace)
        await api.admin.patch(f"/virtual-hosts/{host['id']}", {"listen_port": 8080})
        other = await api.admin.post(f"{below}/virtual-hosts", HOST)
        await api.admin.delete(f"/upstreams/{upstream['id']}")
        found = await api.admin.get(f"{below}/configs/diff?from={before}")

    assert (found["from"], found["to"]) == (before, before + 3)
    assert sorted(found["differences"], key=lambda one: str(one["change"])) == [
        {"section": "virtual_hosts", "id": other["id"], "change": "added", "fields": {}},
        {
            "section": "virtual_hosts",
            "id": host["id"],
            "change": "changed",
            "fields": {"listen_port": [80, 8080]},
        },
        {"section": "upstreams", "id": upstream["id"], "change": "removed", "fields": {}},
    ]


async def test_a_workspace_goes_back_to_what_a_version_said_under_a_new_number(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        below = f"/workspaces/{workspace}"
        one = await api.admin.post(f"{below}/upstreams", UPSTREAM)
        two = await api.admin.post(f"{below}/upstreams", {**UPSTREAM, "name": "second"})
        host = await api.admin.post(f"{below}/virtual-hosts", HOST)
        good = await version(api, workspace)
        then = await api.admin.get(f"{below}/export")

        await api.admin.delete(f"/virtual-hosts/{host['id']}")
        await api.admin.patch(f"/upstreams/{one['id']}", {"name": "third"})
        await api.admin.patch(f"/upstreams/{two['id']}", {"name": UPSTREAM["name"]})
        await api.admin.post(f"{below}/upstreams", {**UPSTREAM, "name": "second"})
        await api.admin.call("PUT", f"{below}/settings", {"env_vars": {"A": "b"}})
        newest = await version(api, workspace)

        answer = await api.admin.post(f"{below}/rollback", {"version": good}, status=200)
        assert answer == {"version": newest + 1, "restored_version": good}
        now = await api.admin.get(f"{below}/export")
        for section in ("settings", "upstreams", "virtual_hosts"):
            key = lambda one: one["id"] if isinstance(one, dict) else one  # noqa: E731
            assert sorted(now[section], key=key) == sorted(then[section], key=key)
        found = await api.admin.get(f"{below}/configs/diff?from={good}&to={newest + 1}")
        assert found["differences"] == []
        assert (await api.admin.get(f"/virtual-hosts/{host['id']}"))["name"] == HOST["name"]
        await api.admin.post(f"{below}/upstreams", {**UPSTREAM, "name": "third"})


async def test_a_version_whose_certificate_is_gone_cannot_come_back(tmp_path: Path) -> None:
    chain, key = pem_pair("example.com")
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        below = f"/workspaces/{workspace}"
        made = await api.admin.post(
            f"{below}/certificates/import", {"certificate": chain, "private_key": key}
        )
        body = {**HOST, "listen_port": 443, "ssl_enabled": True, "ssl_certificate_id": made["id"]}
        host = await api.admin.post(f"{below}/virtual-hosts", body)
        good = await version(api, workspace)
        await api.admin.delete(f"/virtual-hosts/{host['id']}")
        await api.admin.delete(f"/certificates/{made['id']}")

        found = await api.admin.faults("POST", f"{below}/rollback", {"version": good})
        assert found == [(f"virtual_hosts.{host['id']}.ssl_certificate_id", "UNKNOWN_REFERENCE")]
        assert await api.admin.refused("POST", f"{below}/rollback", {"version": 99}) == (404, "NOT_FOUND")


async def test_one_agent_is_rolled_back_alone_until_it_is_released(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        below = f"/workspaces/{workspace}"
        one, other = await enrolled(api, workspace, "one"), await enrolled(api, workspace, "other")
        host = await api.admin.post(f"{below}/virtual-hosts", HOST)
        good = await version(api, workspace)
        await api.admin.patch(f"/virtual-hosts/{host['id']}", {"listen_port": 81})

        answer = await api.admin.post(f"/agents/{one}/rollback", {"version": good}, status=200)
        assert answer == {"version": good + 2, "restored_version": good}
        await api.admin.patch(f"/virtual-hosts/{host['id']}", {"listen_port": 82})
        ports = {
            agent: [spec.listen_port for spec in got.virtual_hosts.values()]
            for agent in (one, other)
            for got in [desired(api, organization, workspace, agent)]
        }
        assert ports == {one: [80], other: [82]}
        assert desired(api, organization, workspace, one).version == good + 3, "never a lower number"

        released = (await api.admin.call("DELETE", f"/agents/{one}/rollback")).json()
        assert released == {"version": good + 4, "restored_version": None}
        config = await api.admin.get(f"/agents/{one}/configs/{good + 4}")
        assert [spec["listen_port"] for spec in config["virtual_hosts"].values()] == [82]


async def test_old_versions_and_their_parts_are_forgotten_but_not_pinned_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspaces_module, "VERSIONS_KEPT", 5)
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        scope, below = workspace_scope(organization, workspace), f"/workspaces/{workspace}"
        agent = await enrolled(api, workspace, "a")
        host = await api.admin.post(f"{below}/virtual-hosts", HOST)
        await api.admin.post(f"/agents/{agent}/rollback", {"version": 2}, status=200)
        for port in range(1000, 1020):
            await api.admin.patch(f"/virtual-hosts/{host['id']}", {"listen_port": port})

        kept = [one.spec.version for one in api.store.list(CONFIG_VERSION, scope)]
        assert kept == [2, 19, 20, 21, 22, 23], "five, and the one that someone serves"
        mentioned = {
            name for one in api.store.list(CONFIG_VERSION, scope) for name in one.spec.virtual_hosts.values()
        }
        assert {part.name for part in api.store.list(CONFIG_PART, scope)} == mentioned
        assert [
            h.listen_port for h in desired(api, organization, workspace, agent).virtual_hosts.values()
        ] == [80]
        await api.admin.delete(f"/agents/{agent}")
        for port in range(2000, 2006):
            await api.admin.patch(f"/virtual-hosts/{host['id']}", {"listen_port": port})
        assert 2 not in [one.spec.version for one in api.store.list(CONFIG_VERSION, scope)]


async def test_changes_at_the_same_time_each_get_their_own_number(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        path = f"/workspaces/{workspace}/virtual-hosts"
        bodies = [{**HOST, "server_name": f"h{n}.example.com"} for n in range(30)]
        answers = await asyncio.gather(*(api.admin.call("POST", path, body) for body in bodies))
        clash = await asyncio.gather(*(api.admin.call("POST", path, HOST) for _ in range(5)))

        assert {answer.status_code for answer in answers} == {201}
        assert sorted(answer.status_code for answer in clash) == [201] + [409] * 4
        assert await version(api, workspace) == 32


async def test_an_export_comes_in_again_elsewhere_and_twice_is_once(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        _, source = await api.workspace()
        organization, target = await api.workspace()
        upstream = await api.admin.post(f"/workspaces/{source}/upstreams", UPSTREAM)
        await api.admin.post(
            f"/workspaces/{source}/virtual-hosts",
            {
                **HOST,
                "locations": [{"path": "/", "upstream_id": upstream["id"]}],
            },
        )
        bundle: dict[str, Any] = await api.admin.get(f"/workspaces/{source}/export")

        path = f"/workspaces/{target}/import"
        trial = await api.admin.post(f"{path}?dry_run=true", bundle, status=200)
        assert trial == {"created": 2, "updated": 0, "version": 1, "dry_run": True}
        assert (await api.admin.get(f"/workspaces/{target}/upstreams"))["meta"]["total"] == 0
        first = await api.admin.post(path, bundle, status=200)
        again = await api.admin.post(path, bundle, status=200)
        assert (first["created"], first["version"]) == (2, 2)
        assert (again["updated"], again["version"]) == (2, 2)
        (host,) = (await api.admin.get(f"/workspaces/{target}/export"))["virtual_hosts"]
        (copy,) = (await api.admin.get(f"/workspaces/{target}/upstreams"))["data"]
        assert host["locations"][0]["upstream_id"] == copy["id"] != upstream["id"]

        bundle["virtual_hosts"][0]["listen_port"] = 0
        assert await api.admin.faults("POST", path, bundle) == [
            ("virtual_hosts.0.listen_port", "OUT_OF_RANGE")
        ]
        assert await (await api.person(organization, "operator")).refused("POST", path, bundle) == (
            403,
            "FORBIDDEN",
        )


async def test_an_export_with_certificates_applies_once_they_are_there(tmp_path: Path) -> None:
    chain, key = pem_pair("example.com")
    pair = {"certificate": chain, "private_key": key}
    async with rest_api(tmp_path) as api:
        (_, source), (_, target) = await api.workspace(), await api.workspace()
        ours = (await api.admin.post(f"/workspaces/{source}/certificates/import", pair))["id"]
        host = {**HOST, "listen_port": 443, "ssl_enabled": True, "ssl_certificate_id": ours}
        host["tls"] = {"client_certificates": {"authority_id": ours}}
        await api.admin.post(f"/workspaces/{source}/virtual-hosts", host)
        bundle: dict[str, Any] = await api.admin.get(f"/workspaces/{source}/export")
        assert bundle["certificates"] == [{"id": ours, "domain": "example.com", "provider": "imported"}]
        assert "PRIVATE" not in str(bundle)

        path = f"/workspaces/{target}/import"
        refused = await api.admin.call("POST", path, bundle)
        assert refused.status_code == 422
        (told,) = [one for one in refused.json()["error"]["details"] if one["field"] == "certificates.0"]
        assert "no certificate for example.com" in told["message"]

        theirs = (await api.admin.post(f"/workspaces/{target}/certificates/import", pair))["id"]
        await api.admin.post(path, bundle, status=200)
        (copy,) = (await api.admin.get(f"/workspaces/{target}/export"))["virtual_hosts"]
        assert copy["ssl_certificate_id"] == theirs != ours
        assert copy["tls"]["client_certificates"]["authority_id"] == theirs


async def test_the_caches_of_a_workspace_have_a_bound_together(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        path = f"/workspaces/{workspace}/virtual-hosts"
        await api.admin.post(path, {**HOST, "cache": {"max_mb": 60_000}})
        other = {**HOST, "name": "other", "server_name": "other.test", "cache": {"max_mb": 60_000}}
        assert await api.admin.faults("POST", path, other) == [("cache.max_mb", "TOO_MANY")]
        await api.admin.post(path, {**other, "cache": {"max_mb": 40_000}})
        bundle = await api.admin.get(f"/workspaces/{workspace}/export")
        bundle["virtual_hosts"][0]["cache"]["max_mb"] = 60_001
        found = await api.admin.faults("POST", f"/workspaces/{workspace}/import", bundle)
        assert found == [("virtual_hosts", "TOO_MANY")]


async def test_a_proposal_is_judged_without_being_made(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        path = f"/workspaces/{workspace}/config/validate"
        good = await api.admin.post(path, {"virtual_host": HOST, "upstream": UPSTREAM}, status=200)
        bad = await api.admin.post(path, {"virtual_host": {**HOST, "listen_port": 0}}, status=200)
        made = await api.admin.post(f"/workspaces/{workspace}/virtual-hosts", HOST)
        clash = await api.admin.post(path, {"virtual_host": HOST}, status=200)
        instead = f"{path}?virtual_host_id={made['id']}"
        replaced = await api.admin.post(instead, {"virtual_host": HOST}, status=200)
        missing = await api.admin.refused("POST", f"{path}?virtual_host_id=no-such", {"virtual_host": HOST})

        assert good == {"valid": True, "errors": []}
        assert [error["field"] for error in bad["errors"]] == ["virtual_host.listen_port"]
        assert [error["code"] for error in clash["errors"]] == ["NOT_UNIQUE"]
        assert replaced == {"valid": True, "errors": []}  # it does not clash with what it takes the place of
        assert missing[0] == 404
        assert await version(api, workspace) == 2
        assert await api.admin.refused("POST", path, {}) == (422, "VALIDATION_ERROR")
        assert await api.admin.faults("POST", path, {"config_content": "events {}"}) == [
            ("agent_id", "UNKNOWN_REFERENCE")
        ]
