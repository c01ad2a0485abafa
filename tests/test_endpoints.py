from __future__ import annotations

import dataclasses
import ssl
from pathlib import Path
from typing import cast

import httpx
import pytest
from prometheus_client import CollectorRegistry

from fleetplane import settings
from fleetplane.domains import discovery
from fleetplane.domains.declaration import Listener
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import SettingsError
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.rpc import GrpcApp, ListenerSpec, open_listener
from fleetplane.server import endpoints
from fleetplane.web.ops import OpsApp

NO_APP = cast("GrpcApp", object())
NO_AUTHORITY = cast("Authority", object())


def loaded(**flags: str) -> settings.Settings:
    return settings.load(
        config=None, environment={}, flags={key.replace("__", "."): value for key, value in flags.items()}
    )


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:80", True),
        ("127.8.8.8:80", True),
        ("[::1]:80", True),
        ("localhost:80", True),
        ("unix:///run/x.sock", True),
        ("unix:", True),
        ("0.0.0.0:80", False),
        ("[::]:80", False),
        ("192.0.2.1:80", False),
        ("example.org:80", False),
    ],
)
def test_only_loopback_and_sockets_are_local(address: str, expected: bool) -> None:
    assert endpoints.is_local(address) is expected


def listener(name: str) -> Listener:
    found = discovery.installed().declarations
    return next(one for domain in found for one in domain.listeners if one.name == name)


def device_api(given: settings.Settings) -> ListenerSpec:
    return endpoints.opened(given, listener("device-api"), NO_APP, NO_AUTHORITY, ())


def test_the_device_api_refuses_plain_text_beyond_this_machine_unless_told() -> None:
    flags = {"listeners.device-api.addresses": "192.0.2.1:50051"}
    with pytest.raises(SettingsError, match=r"other machines could reach 192\.0\.2\.1:50051"):
        device_api(loaded(**flags))

    told = loaded(**flags, **{"listeners.device-api.allow_remote_plaintext": "true"})
    assert device_api(told).addresses == ("192.0.2.1:50051",)


async def test_the_edge_listener_holds_as_many_connections_as_it_is_told_with_tls_and_without(
    tmp_path: Path,
) -> None:
    clock = SystemClock()
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=(), clock=clock) as store:
        authority = await Authority.load_or_create(store, MasterKey(bytes(32), clock), clock)
        for tls in ("false", "true"):
            flags = {"listeners.edge.connections": "11000", "listeners.edge.tls": tls}
            spec = endpoints.opened(loaded(**flags), listener("edge"), NO_APP, authority, ())
            assert endpoints.within_budget(loaded(**flags), spec).connections == 11_000
    with pytest.raises(SettingsError, match=r"listeners\.\*\.connections"):
        loaded(listeners__edge__connections="-1")


def test_the_default_socket_is_the_systems_for_root_and_ours_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = loaded(data_dir="/srv/fleet")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert device_api(given).addresses[0] == "unix:///var/run/device-api/device.sock"

    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert device_api(given).addresses[0] == "unix:///srv/fleet/device.sock"


async def test_the_web_listener_speaks_tls_as_soon_as_it_is_bound_elsewhere(tmp_path: Path) -> None:
    clock = SystemClock()
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=(), clock=clock) as store:
        master = MasterKey(bytes(32), clock)
        authority = await Authority.load_or_create(store, master, clock)
        app = OpsApp(CollectorRegistry(), version="test")
        assert endpoints.web(loaded(), app, authority).tls is None

        spec = endpoints.web(loaded(listeners__web__addresses="0.0.0.0:0"), app, authority)
        # The same listener, but bound where a test may listen.
        async with open_listener(
            dataclasses.replace(spec, addresses=("127.0.0.1:0",)), grace_seconds=1
        ) as web:
            trust = ssl.create_default_context(cadata=authority.certificate_pem.decode())
            async with httpx.AsyncClient(verify=trust) as client:
                answer = await client.get(f"{web.addresses[0]}/healthz")

    assert web.addresses[0].startswith("https://")
    assert answer.text == "ok\n"
