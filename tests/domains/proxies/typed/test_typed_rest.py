"""Typed options over REST: shown where given, absent where not, nothing of another workspace."""

from __future__ import annotations

from pathlib import Path

from support.proxies.proxy_api import HOST, Api, rest_api
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.proxies.kinds.records import VIRTUAL_HOST


async def test_options_are_kept_changed_and_taken_away(tmp_path: Path) -> None:
    chain, key = ThrowawayCa().server(tmp_path)
    brought = {"certificate": chain.read_text(), "private_key": key.read_text(), "domain": "ca.example"}
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        _, other = await api.workspace()
        below = f"/workspaces/{workspace}"
        ours = (await api.admin.post(f"{below}/certificates/import", brought))["id"]
        theirs = (await api.admin.post(f"/workspaces/{other}/certificates/import", brought))["id"]
        plain = await api.admin.post(f"{below}/virtual-hosts", HOST)
        assert not {"tls", "listening"} & plain.keys()
        secure = {"ssl_enabled": True, "ssl_certificate_id": ours, "listen_port": 443}
        trusting = {"client_certificates": {"authority_id": theirs}}
        body = {**HOST, **secure, "name": "B", "server_name": "b.test", "tls": trusting}
        assert await api.admin.faults("POST", f"{below}/virtual-hosts", body) == [
            ("tls.client_certificates.authority_id", "UNKNOWN_REFERENCE")
        ]
        trusting = {"client_certificates": {"authority_id": ours}}
        made = await api.admin.post(f"{below}/virtual-hosts", {**body, "tls": trusting})
        place = f"/virtual-hosts/{made['id']}"
        assert made["tls"]["client_certificates"]["mode"] == "required"
        held = await api.admin.faults("DELETE", f"/certificates/{ours}")
        assert ("tls.client_certificates", "IN_USE") in held
        users = await api.admin.get(f"/certificates/{ours}/users")
        assert [one["id"] for one in users["presented_by"]] == [made["id"]]
        assert [one["name"] for one in users["trusted_by"]] == ["B"]
        changed = await api.admin.patch(place, {"tls": {"force_https": True}, "listening": {"ipv6": False}})
        assert changed["tls"] == {"force_https": True, "ocsp_stapling": False}
        assert "tls" not in await api.admin.patch(place, {"tls": None})
        assert (await api.admin.get(place))["listening"] == {"ipv6": False}
        assert await api.admin.refused("PATCH", place, {"tls": {"force_htps": True}}) == (
            422,
            "VALIDATION_ERROR",
        )
        exported = await api.admin.get(f"{below}/export")
        assert [one.get("listening") for one in exported["virtual_hosts"]] == [None, {"ipv6": False}]


async def test_a_purge_begins_a_new_generation(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        below = f"/workspaces/{workspace}"
        made = await api.admin.post(f"{below}/virtual-hosts", {**HOST, "cache": {}})
        purge = f"/virtual-hosts/{made['id']}/cache/purge"
        assert (await api.admin.post(purge, status=200))["cache"]["generation"] == 1
        await api.admin.patch(f"/virtual-hosts/{made['id']}", {"cache": None})
        assert (await api.admin.call("POST", purge)).status_code == 409
        group = {"name": "g", "servers": [{"address": "a:1"}], "protocol": "grpc"}
        upstream = await api.admin.post(f"{below}/upstreams", group)
        assert upstream["protocol"] == "grpc"
        plain = await api.admin.patch(f"/upstreams/{upstream['id']}", {"protocol": None})
        assert "protocol" not in plain


async def test_passwords_are_hashed_and_never_shown(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        operator = await api.person(organization, "operator")
        below = f"/workspaces/{workspace}"
        location = {
            "path": "/",
            "proxy_pass": "http://x:1",
            "access": {"users": [{"name": "eve", "password": "p2"}]},
        }
        users = [{"name": "ann", "password": "the password"}]
        made = await operator.post(
            f"{below}/virtual-hosts", {**HOST, "access": {"users": users}, "locations": [location]}
        )
        place = f"/virtual-hosts/{made['id']}"
        assert made["access"]["users"] == [{"name": "ann"}]
        assert made["locations"][0]["access"]["users"] == [{"name": "eve"}]

        def kept() -> list[object]:
            return [user.password_hash for user in api.workspaces.hosts(_scope(api))[made["id"]].access.users]  # type: ignore[union-attr]

        (first,) = kept()
        assert str(first).startswith("$6$")
        more = [{"name": "ann"}, {"name": "bob", "password": "b"}]
        changed = await operator.patch(place, {"access": {"users": more}})
        assert changed["access"]["users"] == [{"name": "ann"}, {"name": "bob"}]
        assert kept()[0] == first, "who comes without a password keeps theirs"
        unknown = [{"name": "new"}]
        assert await operator.faults("PATCH", place, {"access": {"users": unknown}}) == [
            ("access.users.0.password", "REQUIRED")
        ]
        viewer = await api.person(organization, "viewer")
        for path in (f"{below}/export", f"{below}/configs/1", place):
            assert "$6$" not in (await viewer.call("GET", path)).text
        audit = await api.admin.call("GET", f"/organizations/{organization}/audit")
        assert "the password" not in audit.text
        assert "$6$" not in audit.text


def _scope(api: Api) -> str:
    (host,) = api.store.list(VIRTUAL_HOST)
    return host.scope
