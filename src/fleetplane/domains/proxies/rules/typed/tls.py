"""TLS options of a virtual host, and how it listens. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fleetplane.domains.proxies.kinds.records import VirtualHostSpec
from fleetplane.domains.proxies.rules.typed.networks import networks_problems
from fleetplane.domains.proxies.typed_options import HostTls, Listening
from fleetplane.web.rest.problems import Code, Problem

HSTS_LIMIT_SECONDS = 10 * 31_536_000
PRELOAD_SECONDS = 31_536_000
"""What the lists of browsers ask for."""
DEPTH_LIMIT = 10


def tls_problems(spec: VirtualHostSpec, certificates: Collection[str]) -> Iterator[Problem]:
    """`certificates` are those that there are."""
    tls = spec.tls
    if not tls:
        return
    if not spec.ssl_enabled and tls != HostTls():
        yield Problem(field="tls", message="Needs ssl_enabled to be true", code=Code.INCOMPATIBLE)
    if tls.force_https and spec.listen_port == 80:
        yield Problem(
            field="tls.force_https",
            message="The host itself listens on port 80; give it another port, such as 443",
            code=Code.INCOMPATIBLE,
        )
    if hsts := tls.hsts:
        if not 0 <= hsts.max_age <= HSTS_LIMIT_SECONDS:
            yield Problem(
                field="tls.hsts.max_age",
                message=f"Must be between 0 and {HSTS_LIMIT_SECONDS}",
                code=Code.OUT_OF_RANGE,
            )
        if hsts.preload and not (hsts.include_subdomains and hsts.max_age >= PRELOAD_SECONDS):
            yield Problem(
                field="tls.hsts.preload",
                message=f"Needs include_subdomains and a max_age of {PRELOAD_SECONDS} or more",
                code=Code.INCOMPATIBLE,
            )
    if clients := tls.client_certificates:
        if clients.authority_id not in certificates:
            yield Problem(
                field="tls.client_certificates.authority_id",
                message="There is no such certificate in this workspace",
                code=Code.UNKNOWN_REFERENCE,
            )
        if not 1 <= clients.depth <= DEPTH_LIMIT:
            yield Problem(
                field="tls.client_certificates.depth",
                message=f"Must be between 1 and {DEPTH_LIMIT}",
                code=Code.OUT_OF_RANGE,
            )


def listening_problems(listening: Listening) -> Iterator[Problem]:
    if isinstance(listening.proxy_protocol_from, tuple):
        yield from networks_problems(listening.proxy_protocol_from, "listening.proxy_protocol_from")


def host_needs(spec: VirtualHostSpec) -> Iterator[tuple[str, str]]:
    """Features that the agents of a host must have, each with the field that needs it."""
    if spec.tls:
        yield "tls", "tls"
    if spec.listening and spec.listening.proxy_protocol_from:
        yield "realip", "listening.proxy_protocol_from"
