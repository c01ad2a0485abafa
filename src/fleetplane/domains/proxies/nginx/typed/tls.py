"""TLS options of a virtual host, and how it listens. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from fleetplane.domains.proxies.nginx.blocks import Directive, Unrenderable, directive
from fleetplane.domains.proxies.typed_options import HostOptions, Hsts

HTTP_PORT: Final = 80
HTTPS_PORT: Final = 443
_MODERN: Final = ("TLSv1.3",)
_INTERMEDIATE: Final = (
    "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-GCM-SHA384:"
    "ECDHE-RSA-AES256-GCM-SHA384:ECDHE-ECDSA-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305"
)
"""The suites of TLS 1.2 that have forward secrecy and authenticated encryption; those of 1.3 all have."""


def authority_file(host: str) -> str:
    """Where the authority of a host's clients lies in the release; NGINX names it in what it says."""
    return f"certs/authority-{host}.pem"


def profile(options: Sequence[HostOptions]) -> Iterator[Directive]:
    """The protocols of a port: negotiated before the client's name for the server is known."""
    if options and all(one.tls and one.tls.profile == "modern" for one in options):
        yield directive("ssl_protocols", *_MODERN)


def secured(host: str, certificate: str, options: HostOptions) -> Iterator[Directive]:
    """What a host with a certificate says about TLS."""
    tls = options.tls
    if not tls:
        return
    yield from profile([options])
    if tls.profile == "intermediate":
        yield directive("ssl_ciphers", _INTERMEDIATE)
    if tls.client_certificates:
        if not options.authority_pem:
            raise Unrenderable("tls.client_certificates: the authority is missing")
        yield directive("ssl_client_certificate", authority_file(host))
        required = tls.client_certificates.mode == "required"
        yield directive("ssl_verify_client", "on" if required else "optional")
        yield directive("ssl_verify_depth", str(tls.client_certificates.depth))
        # A session of another host on this port must not stand in for a certificate.
        yield directive("ssl_session_cache", "none")
        yield directive("ssl_session_tickets", "off")
    if tls.ocsp_stapling:
        yield directive("ssl_stapling", "on")
        yield directive("ssl_stapling_verify", "on")
        yield directive("ssl_trusted_certificate", f"certs/{certificate}.pem")
    if tls.hsts:
        yield directive("add_header", "Strict-Transport-Security", _hsts(tls.hsts), "always")


def _hsts(hsts: Hsts) -> str:
    parts = [f"max-age={hsts.max_age}"]
    parts += ["includeSubDomains"] if hsts.include_subdomains else []
    return "; ".join([*parts, *(["preload"] if hsts.preload else [])])


def client_headers(options: HostOptions) -> dict[str, str]:
    """What the other side is told of the client's certificate; always set, so that a visitor cannot."""
    if not (options.tls and options.tls.client_certificates):
        return {}
    return {"X-Client-Verify": "$ssl_client_verify", "X-Client-Subject": "$ssl_client_s_dn"}


def forces_https(options: HostOptions) -> bool:
    return bool(options.tls and options.tls.force_https)


def https_url(port: int) -> str:
    return f"https://$host{'' if port == HTTPS_PORT else f':{port}'}$request_uri"


# Listening.


def addresses(given: Sequence[str], options: HostOptions) -> list[str]:
    if options.listening and not options.listening.ipv6:
        return [one for one in given if not one.startswith("[")]
    return list(given)


def listen_options(options: HostOptions) -> list[str]:
    return ["proxy_protocol"] if options.listening and options.listening.proxy_protocol_from else []


def real_addresses(options: HostOptions) -> Iterator[Directive]:
    """Whose PROXY protocol header names the client."""
    for network in (options.listening and options.listening.proxy_protocol_from) or ():
        yield directive("set_real_ip_from", network)
    if listen_options(options):
        yield directive("real_ip_header", "proxy_protocol")
