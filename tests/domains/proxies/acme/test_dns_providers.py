from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from support.proxies.dns_doubles import PlainDns, ZoneFile, powerdns
from support.proxies.pebble_lab import Pebble

from fleetplane.domains.proxies.acme.dns_provider import (
    DnsProvider,
    DnsZones,
    LexiconDns,
    Propagation,
    known_provider,
)
from fleetplane.domains.proxies.acme.orders import IssuanceFailed
from fleetplane.domains.proxies.acme.workers import AcmeWorkers
from fleetplane.kernel.clock import SystemClock

_SITES = itertools.count(1)


@pytest.fixture
def domain() -> str:
    """Each test has its own: the DNS server is shared."""
    return f"dns-{next(_SITES)}.test"


@pytest.fixture
def zone(authority: Pebble) -> ZoneFile:
    return ZoneFile(authority)


@pytest.fixture(params=["plain", "lexicon"])
def provider(request: pytest.FixtureRequest, zone: ZoneFile, domain: str) -> Iterator[DnsProvider]:
    if request.param == "plain":
        yield PlainDns(zone)
        return
    with powerdns(zone, domain) as options:
        yield LexiconDns(AcmeWorkers("DNS"), provider="powerdns", zone=domain, options=options)


def visible(pebble: Pebble, *, seconds: float = 60.0) -> Propagation:
    return Propagation(
        SystemClock(), servers=[("127.0.0.1", pebble.dns_port)], wait_seconds=seconds, poll_seconds=0.02
    )


# What every provider promises.


async def test_a_record_can_be_seen_beside_its_neighbours_and_is_gone_alone(
    provider: DnsProvider, authority: Pebble, zone: ZoneFile, domain: str
) -> None:
    name = f"_acme-challenge.{domain}"
    await provider.present(name, "one")
    await provider.present(name, "two")
    await visible(authority).wait(name, {"one", "two"})
    await provider.clear(name, "one")
    assert zone.texts(name) == ["two"]
    await visible(authority).wait(name, {"two"})
    with pytest.raises(IssuanceFailed, match="did not appear at 127"):
        await visible(authority, seconds=0.1).wait(name, {"one", "two"})


async def test_doing_it_twice_is_as_good_as_once(provider: DnsProvider, zone: ZoneFile, domain: str) -> None:
    name = f"_acme-challenge.{domain}"
    await provider.present(name, "one")
    await provider.present(name, "one")
    assert zone.texts(name) == ["one"]
    await provider.clear(name, "one")
    await provider.clear(name, "one")
    await provider.clear(name, "never there")
    assert zone.texts(name) == []


# What is the adapter's own.


async def test_a_refusal_carries_the_providers_words_and_no_credential(zone: ZoneFile, domain: str) -> None:
    with powerdns(zone, domain) as options:
        wrong = {**options, "auth_token": "changeme too"}
        dns = LexiconDns(AcmeWorkers("DNS"), provider="powerdns", zone=domain, options=wrong)
        with pytest.raises(IssuanceFailed, match=r"powerdns refused.*401") as refused:
            await dns.present(f"_acme-challenge.{domain}", "one")
    assert "changeme" not in refused.value.message
    assert "changeme" not in repr(dns)
    assert zone.writes == 0


async def test_a_zone_that_the_provider_does_not_have_is_refused(zone: ZoneFile, domain: str) -> None:
    with powerdns(zone, domain) as options:
        dns = LexiconDns(AcmeWorkers("DNS"), provider="powerdns", zone="other.test", options=options)
        with pytest.raises(IssuanceFailed, match="404"):
            await dns.present("_acme-challenge.other.test", "one")


async def test_an_unknown_provider_is_refused() -> None:
    dns = LexiconDns(AcmeWorkers("DNS"), provider="nobody", zone="example.test", options={})
    with pytest.raises(IssuanceFailed, match="nobody"):
        await dns.present("_acme-challenge.example.test", "one")
    assert not known_provider("nobody")
    assert known_provider("powerdns")
    assert known_provider("cloudflare")


# Which provider.


def test_the_smallest_zone_that_a_domain_lies_in_decides(zone: ZoneFile) -> None:
    wide, narrow = PlainDns(zone), PlainDns(zone)
    zones = DnsZones({"example.com": wide, "Lab.Example.com.": narrow})
    assert zones.provider("*.example.com") is wide
    assert zones.provider("a.b.example.com") is wide
    assert zones.provider("*.lab.example.com") is narrow
    assert zones.provider("x.LAB.example.com") is narrow
    assert zones.provider("notexample.com") is None
    assert not zones.covers("com")
