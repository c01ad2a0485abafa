"""One bad part of a configuration does not hold up the others; a real NGINX decides which is bad."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.proxies.nginx_rig import Rig, backend, host, saying, upstream
from support.shared.free_ports import free_port

from fleetplane.domains.proxies.agent.nginx import confirmation as journals
from fleetplane.domains.proxies.agent.nginx import parts
from fleetplane.domains.proxies.agent.nginx.applier import VersionApplier
from fleetplane.domains.proxies.agent.nginx.confirmation import ChangeJournal, VersionState
from fleetplane.domains.proxies.nginx.rendering import checksum, render
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb


async def ask(port: int, name: str = "a.test") -> str:
    """The status and body of an answer; empty if nobody listens."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return ""
    try:
        writer.write(f"GET / HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        return f"{head.split()[1]} {body}"
    finally:
        writer.close()


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", free_port()))
        holder.listen()
        yield int(holder.getsockname()[1])


def words(text: str, port: int, *, identity: str, name: str) -> pb.VirtualHost:
    location = pb.Location(path="/", custom_directives={"return": f"200 {text}"})
    return host(port, location, identity=identity, name=name)


def update(version: int, *hosts: pb.VirtualHost, upstreams: tuple[pb.Upstream, ...] = ()) -> pb.ConfigUpdate:
    return pb.ConfigUpdate(config_id=f"c{version}", version=version, virtual_hosts=hosts, upstreams=upstreams)


def bad(one: pb.VirtualHost) -> pb.VirtualHost:
    """NGINX refuses it, and only NGINX can tell."""
    made = pb.VirtualHost()
    made.CopyFrom(one)
    made.locations.append(pb.Location(path="~ ^/(unclosed", root="/srv/www/nowhere"))
    return made


async def opened(rig: Rig) -> VersionApplier:
    applier = rig.applier()
    await applier.open()
    return applier


async def test_a_bad_host_is_set_aside_with_nginxs_words_and_the_others_go_live(rig: Rig) -> None:
    port, applier = free_port(), await opened(rig)
    good = words("good", port, identity="h1", name="a.test")
    wrong = bad(words("wrong", port, identity="h2", name="b.test"))
    outcome = await applier.apply(update(1, wrong, good), rig.report)
    assert outcome.state is VersionState.SUCCESS
    assert list(outcome.set_aside) == ["virtual_host/h2"]
    said = outcome.set_aside["virtual_host/h2"]
    assert said.startswith("[emerg] pcre"), "without moments and numbers that differ each time"
    assert " in conf.d/host-h2.conf:" in said, "file and line"
    assert rig.statuses[-1].set_aside == outcome.set_aside
    assert "virtual host h2" in rig.statuses[-1].error
    assert await ask(port) == "200 good"
    assert applier.live is not None
    assert applier.live.manifest.version == 1

    successor = await opened(rig)
    assert successor.live is not None
    assert successor.live.manifest.set_aside == outcome.set_aside
    assert [one.id for one in successor.live.served.virtual_hosts] == ["h1"]
    assert [one.id for one in successor.live.update.virtual_hosts] == ["h2", "h1"]


async def test_a_host_that_was_good_is_served_on_in_its_former_form(rig: Rig) -> None:
    port, applier = free_port(), await opened(rig)
    first = [
        words("one", port, identity="h1", name="a.test"),
        words("two", port, identity="h2", name="b.test"),
    ]
    assert (await applier.apply(update(1, *first), rig.report)).state is VersionState.SUCCESS
    changed = [words("new", port, identity="h1", name="a.test"), bad(first[1])]
    outcome = await applier.apply(update(2, *changed), rig.report)
    assert (outcome.state, list(outcome.set_aside)) == (VersionState.SUCCESS, ["virtual_host/h2"])
    assert await ask(port) == "200 new"
    assert await ask(port, "b.test") == "200 two"

    # The name goes to another host: what only stayed for want of something better gives way.
    renamed = bad(words("two", port, identity="h2", name="c.test"))
    third = [changed[0], renamed, words("three", port, identity="h3", name="b.test")]
    outcome = await applier.apply(update(3, *third), rig.report)
    assert (outcome.state, list(outcome.set_aside)) == (VersionState.SUCCESS, ["virtual_host/h2"])
    assert await ask(port, "b.test") == "200 three"


async def test_a_version_of_which_nothing_new_can_be_served_has_failed(rig: Rig) -> None:
    port, applier = free_port(), await opened(rig)
    first = words("one", port, identity="h1", name="a.test")
    assert (await applier.apply(update(1, first), rig.report)).state is VersionState.SUCCESS
    outcome = await applier.apply(update(2, bad(first)), rig.report)
    assert (outcome.state, "conf.d/host-h1.conf:" in outcome.error) == (VersionState.FAILED, True)
    assert await ask(port) == "200 one"
    assert applier.live is not None
    assert applier.live.manifest.version == 1


async def test_hosts_of_an_upstream_whose_name_is_not_resolved_wait_and_return(rig: Rig) -> None:
    port, applier = free_port(), await opened(rig)
    proxied = host(port, pb.Location(path="/", upstream_id="u1"), identity="h2", name="b.test")
    good = words("good", port, identity="h1", name="a.test")
    nowhere = upstream("fleetplane-test.invalid:80")
    outcome = await applier.apply(update(1, good, proxied, upstreams=(nowhere,)), rig.report)
    assert outcome.state is VersionState.SUCCESS
    assert sorted(outcome.set_aside) == ["upstream/u1", "virtual_host/h2"]
    assert "host not found in upstream" in outcome.set_aside["virtual_host/h2"]
    assert await ask(port) == "200 good"

    # Sent again it is tried again, and while that gets nowhere NGINX is not touched.
    workers = await rig.workers()
    again = await applier.apply(update(1, good, proxied, upstreams=(nowhere,)), rig.report)
    assert (again.state, sorted(again.set_aside)) == (
        VersionState.SUCCESS,
        ["upstream/u1", "virtual_host/h2"],
    )
    assert rig.nginx.workers() == workers

    async with backend("behind") as one:
        outcome = await applier.apply(
            update(2, good, proxied, upstreams=(upstream(one.address),)), rig.report
        )
        assert (outcome.state, dict(outcome.set_aside)) == (VersionState.SUCCESS, {})
        assert await ask(port, "b.test") == "200 behind"


@pytest.mark.parametrize("by_upstream", [True, False])
async def test_a_name_in_service_that_is_not_resolved_any_more_is_served_on_and_holds_up_nobody(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, by_upstream: bool
) -> None:
    port, applier = free_port(), await opened(rig)
    async with backend("behind") as one:
        named = f"localhost:{one.port}"
        location = pb.Location(path="/", upstream_id="u1")
        if not by_upstream:
            location = pb.Location(path="/", proxy_pass=f"http://{named}")
        proxied = host(port, location, identity="h2", name="b.test")
        groups = (upstream(named),) if by_upstream else ()
        file = "upstream-u1" if by_upstream else "host-h2"
        assert (
            await applier.apply(update(1, proxied, upstreams=groups), rig.report)
        ).state is VersionState.SUCCESS
        assert await ask(port, "b.test") == "200 behind"

        # From now on NGINX does not find the name, as far as its test goes.
        test = rig.nginx.test

        async def without_names(config: Path, **options: Any) -> str:
            text = "".join(path.read_text() for path in config.parent.glob("conf.d/*.conf"))
            if "localhost" in text:
                return f'[emerg] host not found in upstream "{named}" in {config.parent}/conf.d/{file}.conf:3'
            return await test(config, **options)

        monkeypatch.setattr(rig.nginx, "test", without_names)
        good = words("good", port, identity="h1", name="a.test")
        asked = update(2, proxied, good, upstreams=groups)
        outcome = await applier.apply(asked, rig.report)
        assert outcome.state is VersionState.SUCCESS
        assert list(outcome.set_aside) == ["upstream/u1" if by_upstream else "virtual_host/h2"]
        assert await ask(port) == "200 good"
        assert await ask(port, "b.test") == "200 behind", "at the address where it was found before"

        successor = await opened(rig)
        if by_upstream:
            dead = {"u1": frozenset({named})}
            assert (await successor.mark_down(dead)).state is VersionState.SUCCESS
            assert (await ask(port, "b.test")).startswith("502")
            assert (await successor.mark_down({})).state is VersionState.SUCCESS
        workers = await rig.workers()
        assert (await successor.apply(asked, rig.report)).set_aside.keys() == outcome.set_aside.keys()
        assert rig.nginx.workers() == workers, "while it is not found, nothing is touched"
        monkeypatch.undo()
        outcome = await successor.apply(asked, rig.report)
        assert (outcome.state, dict(outcome.set_aside)) == (VersionState.SUCCESS, {})
        assert successor.live is not None
        assert successor.live.manifest.pinned == {}
        assert await ask(port, "b.test") == "200 behind"


async def test_a_machine_that_starts_without_its_name_servers_serves_by_the_last_addresses(rig: Rig) -> None:
    port = free_port()
    async with backend("behind") as one:
        name = "fleetplane-test.invalid"
        proxied = host(port, pb.Location(path="/", upstream_id="u1"), identity="h2", name="b.test")
        good = words("good", port, identity="h1", name="a.test")
        asked = update(4, proxied, good, upstreams=(upstream(f"{name}:{one.port}"),))
        # As an agent left it that had found the name.
        rig.releases.prepare()
        rendered = render(asked, rig.site, release="4-9")
        rig.releases.stage("4-9", asked, rendered, {}, resolved={name: ["127.0.0.1"]})
        rig.releases.switch("4-9")
        journals.write(rig.paths.journal, ChangeJournal(live="4-9", serial=9))

        applier = await opened(rig)
        assert not applier.broken
        assert await ask(port) == "200 good"
        assert await ask(port, "b.test") == "200 behind"
        told = applier.last_status
        assert told is not None
        assert (told.version, told.state, list(told.set_aside)) == (4, VersionState.SUCCESS, ["upstream/u1"])
        assert applier.live is not None
        assert applier.live.manifest.checksum == checksum(asked), "it is the version that was asked for"


async def test_a_host_whose_port_is_taken_comes_when_it_is_free_and_costs_no_reload_before(rig: Rig) -> None:
    port, applier = free_port(), await opened(rig)
    good = words("good", port, identity="h1", name="a.test")
    with taken_port() as taken:
        late = words("late", taken, identity="h2", name="b.test")
        outcome = await applier.apply(update(1, good, late), rig.report)
        assert (outcome.state, list(outcome.set_aside)) == (VersionState.SUCCESS, ["virtual_host/h2"])
        assert f"bind() to 127.0.0.1:{taken} failed" in outcome.set_aside["virtual_host/h2"]
        assert await ask(port) == "200 good"
        assert [one.state for one in rig.statuses] == ["PENDING", "VALIDATING", "APPLYING", "SUCCESS"]
        workers = await rig.workers()
        assert list((await applier.apply(update(1, good, late), rig.report)).set_aside) == ["virtual_host/h2"]
        assert rig.nginx.workers() == workers
    outcome = await applier.apply(update(1, good, late), rig.report)
    assert (outcome.state, dict(outcome.set_aside)) == (VersionState.SUCCESS, {})
    assert await ask(taken, "b.test") == "200 late"


async def test_many_bad_hosts_are_found_one_by_one_and_too_many_refuse_the_whole(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, applier = free_port(), await opened(rig)
    wrong = [bad(words("x", port, identity=f"bad{n}", name=f"{n}.test")) for n in range(5)]
    good = words("good", port, identity="h1", name="a.test")
    outcome = await applier.apply(update(1, *wrong, good), rig.report)
    assert (outcome.state, len(outcome.set_aside)) == (VersionState.SUCCESS, 5)
    assert await ask(port) == "200 good"
    monkeypatch.setattr(parts, "ROUNDS_LIMIT", 3)
    newer = words("newer", port, identity="h1", name="a.test")
    outcome = await applier.apply(update(2, *wrong, newer), rig.report)
    assert outcome.state is VersionState.FAILED
    assert await ask(port) == "200 good"


async def test_a_bad_setting_of_the_whole_refuses_the_whole(rig: Rig) -> None:
    port, applier = free_port(), await opened(rig)
    assert (await applier.apply(saying(1, port), rig.report)).state is VersionState.SUCCESS
    wrong = saying(2, port)
    wrong.global_settings.nginx_directives["keepalive_timeout"] = "no-time"
    outcome = await applier.apply(wrong, rig.report)
    assert (outcome.state, dict(outcome.set_aside)) == (VersionState.FAILED, {})
    assert await ask(port) == "200 1"


async def test_dead_servers_are_left_out_without_bringing_back_what_was_set_aside(rig: Rig) -> None:
    port, applier = free_port(), await opened(rig)
    async with backend("one") as one, backend("two") as two:
        group = upstream(one.address, two.address)
        proxied = host(port, pb.Location(path="/", upstream_id="u1"), identity="h1", name="a.test")
        wrong = bad(words("x", port, identity="h2", name="b.test"))
        outcome = await applier.apply(update(1, proxied, wrong, upstreams=(group,)), rig.report)
        assert list(outcome.set_aside) == ["virtual_host/h2"]
        assert (await applier.mark_down({"u1": frozenset({one.address})})).state is VersionState.SUCCESS
        assert {await ask(port) for _ in range(4)} == {"200 two"}
        assert applier.live is not None
        assert list(applier.live.manifest.set_aside) == ["virtual_host/h2"]


# Lineage.


async def test_a_lower_version_is_taken_from_a_server_whose_store_is_another(rig: Rig) -> None:
    port, applier = free_port(), await opened(rig)
    applier.lineage = "first"
    assert (await applier.apply(saying(9, port), rig.report)).state is VersionState.SUCCESS
    assert "stale version" in (await applier.apply(saying(3, port), rig.report)).error
    successor = await opened(rig)
    assert "stale version" in (await successor.apply(saying(3, port), rig.report)).error, "nobody said"
    successor.lineage = "second"
    assert (await successor.apply(saying(3, port), rig.report)).state is VersionState.SUCCESS
    assert await ask(port) == "200 3"
    assert "stale version" in (await successor.apply(saying(2, port), rig.report)).error


# Composing, without NGINX.

IDS = st.sampled_from(["a", "b", "c"])
HOSTS = st.dictionaries(IDS, st.tuples(st.sampled_from(["", "u1", "u2"]), st.integers(1, 3)), max_size=3)
GROUPS = st.dictionaries(st.sampled_from(["u1", "u2"]), st.integers(1, 3), max_size=2)
PARTS = [*(f"virtual_host/{one}" for one in "abc"), "upstream/u1", "upstream/u2"]


def composed(hosts: dict[str, tuple[str, int]], groups: dict[str, int]) -> pb.ConfigUpdate:
    """Hosts mention only upstreams that there are, as the server sees to it."""
    return pb.ConfigUpdate(
        virtual_hosts=[
            host(
                weight,
                *([pb.Location(path="/", upstream_id=group)] if group in groups else []),
                identity=name,
            )
            for name, (group, weight) in hosts.items()
        ],
        upstreams=[upstream(f"127.0.0.1:{port}", identity=name) for name, port in groups.items()],
    )


@given(
    asked=st.builds(composed, HOSTS, GROUPS),
    served=st.builds(composed, HOSTS, GROUPS),
    blamed=st.lists(
        st.sampled_from([*(f"virtual_host/{one}" for one in "abc"), "upstream/u1", "upstream/u2"])
    ),
)
def test_whatever_is_set_aside_the_rest_is_whole(
    asked: pb.ConfigUpdate, served: pb.ConfigUpdate, blamed: list[str]
) -> None:
    setting = parts.Setting(asked, served)
    for name in blamed:
        setting.blame([name], "bad")
    made = setting.effective()
    names = {parts.part(parts.UPSTREAM, one.id) for one in made.upstreams}
    assert all(set(parts.needs(one)) <= names for one in made.virtual_hosts), "every host has what it needs"
    old = {one.id: one for one in served.virtual_hosts}
    for one in asked.virtual_hosts:
        found = [other for other in made.virtual_hosts if other.id == one.id]
        if f"virtual_host/{one.id}" not in setting.aside:
            assert found == [one]
        elif found:
            assert found == [old[one.id]]
        if old.get(one.id) == one and not setting.aside:
            assert found == [one]
