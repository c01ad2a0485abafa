"""Statements that may keep somebody away: what stands beside them is not served without them. Pure.

There is no list of all that do, as every module of NGINX may bring its own. So every statement does,
but for those that are known to open nothing when they are left out.
"""

from __future__ import annotations

from typing import Any, Final

from fleetplane.domains.proxies.importing.reading import Statement

CLOSED: Final = 503
"""What is answered in the place of what cannot be guarded."""
_HARMLESS: Final = frozenset(
    [
        "absolute_redirect",
        "access_log",
        "aio",
        "autoindex",
        "break",
        "chunked_transfer_encoding",
        "connection_pool_size",
        "default_type",
        "directio",
        "error_log",
        "error_page",
        "etag",
        "expires",
        "geo",
        "http2",
        "http3",
        "if_modified_since",
        "ignore_invalid_headers",
        "index",
        "limit_conn",
        "limit_rate",
        "limit_rate_after",
        "limit_req",
        "listen",
        "log_format",
        "map",
        "max_ranges",
        "merge_slashes",
        "output_buffers",
        "port_in_redirect",
        "postpone_output",
        "read_ahead",
        "recursive_error_pages",
        "reset_timedout_connection",
        "resolver",
        "resolver_timeout",
        "root",
        "send_timeout",
        "sendfile",
        "sendfile_max_chunk",
        "server_name",
        "server_name_in_redirect",
        "server_tokens",
        "set",
        "split_clients",
        "try_files",
        "types",
        "underscores_in_headers",
        "variables_hash_bucket_size",
        "variables_hash_max_size",
    ]
)
_FAMILIES: Final = (
    "add_",
    "brotli",
    "charset",
    "client_body_",
    "client_header_",
    "client_max_",
    "grpc_",
    "gzip",
    "http2_",
    "keepalive_",
    "large_client_",
    "limit_conn_",
    "limit_req_",
    "lingering_",
    "log_",
    "map_hash_",
    "more_",
    "open_file_cache",
    "open_log_file_cache",
    "proxy_",
    "request_pool_",
    "server_names_hash_",
    "ssl_",
    "sub_filter",
    "tcp_",
    "types_hash_",
    "worker_",
)
_GUARDS: Final = (
    "grpc_ssl_",
    "proxy_bind",
    "proxy_cookie_",
    "proxy_method",
    "proxy_pass_request_",
    "proxy_set_body",
    "proxy_ssl_",
    "ssl_client_certificate",
    "ssl_crl",
    "ssl_ocsp",
    "ssl_reject_handshake",
    "ssl_trusted_certificate",
    "ssl_verify_",
)
"""Of these families, what says whom to let in, or whom to believe behind."""


def guards(one: Statement) -> bool:
    if one.name == "if" and one.block is not None:
        return any(guards(inner) and not _redirects(inner) for inner in one.block)
    if one.name.startswith(_GUARDS):
        return True
    return one.name not in _HARMLESS and not one.name.startswith(_FAMILIES)


def _redirects(one: Statement) -> bool:
    """Sends everybody elsewhere, as where a certificate's renewal program put it."""
    return one.name == "return" and one.arguments[:1] in (("301",), ("302",), ("303",), ("307",), ("308",))


def closed(location: dict[str, Any]) -> dict[str, Any]:
    return {"path": location["path"], "respond": {"status": CLOSED}}
