"""Every directive that may reach NGINX: where, with which values, and who may write it. An allow-list.

What is not here is refused, whether it was rendered from typed fields, given raw by an
administrator or sent as a text to be tested. Left out on purpose:

- what runs code or loads it: `load_module`, `perl`, Lua, njs, `ssl_engine`, `ssl_conf_command`;
- what opens files by name outside the document roots, or writes them: `include`, logs, `*_store`,
  `*_cache_path`, DAV;
- FastCGI, uwsgi and SCGI: their parameters choose which program the other side runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

from fleetplane.domains.proxies.nginx import checks
from fleetplane.domains.proxies.nginx.checks import Check


class DirectiveContext(StrEnum):
    MAIN = "main"
    EVENTS = "events"
    HTTP = "http"
    SERVER = "server"
    LOCATION = "location"
    CONDITION = "if"
    EXCEPT = "limit_except"
    UPSTREAM = "upstream"
    STREAM = "stream"
    STREAM_SERVER = "stream server"
    STREAM_UPSTREAM = "stream upstream"
    PAIRS = "map"
    """Inside `map`, `geo`, `split_clients` and `types`: names and values, no directives."""


class TextAuthor(IntEnum):
    """Whose text it is; each may write what those before it may."""

    RAW = 1
    """An administrator, one directive at a time."""
    WHOLE = 2
    """The author of a whole configuration that is only tested, never served."""
    AGENT = 3
    """The agent, from typed fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectiveEntry:
    contexts: frozenset[DirectiveContext]
    check: Check
    author: TextAuthor
    opens: DirectiveContext | None = None
    """The context of its block, for what has one."""


_CONTEXTS: Final = {
    "M": DirectiveContext.MAIN,
    "E": DirectiveContext.EVENTS,
    "H": DirectiveContext.HTTP,
    "S": DirectiveContext.SERVER,
    "L": DirectiveContext.LOCATION,
    "I": DirectiveContext.CONDITION,
    "X": DirectiveContext.EXCEPT,
    "U": DirectiveContext.UPSTREAM,
    "T": DirectiveContext.STREAM,
    "V": DirectiveContext.STREAM_SERVER,
    "W": DirectiveContext.STREAM_UPSTREAM,
}

Row = tuple[str, str, Check]

_RAW: Final[tuple[Row, ...]] = (
    (
        (
            "worker_processes worker_rlimit_nofile worker_shutdown_timeout worker_priority "
            "worker_cpu_affinity timer_resolution pcre_jit thread_pool quic_bpf"
        ),
        "M",
        checks.words,
    ),
    (
        "worker_connections multi_accept use accept_mutex accept_mutex_delay worker_aio_requests",
        "E",
        checks.words,
    ),
    # Core.
    (
        (
            "absolute_redirect aio aio_write chunked_transfer_encoding client_body_buffer_size "
            "client_body_in_single_buffer client_body_timeout client_max_body_size directio "
            "directio_alignment etag if_modified_since keepalive_disable keepalive_requests keepalive_time "
            "keepalive_timeout lingering_close lingering_time lingering_timeout log_not_found log_subrequest "
            "max_ranges msie_padding msie_refresh open_file_cache open_file_cache_errors "
            "open_file_cache_min_uses open_file_cache_valid output_buffers port_in_redirect postpone_output "
            "read_ahead recursive_error_pages reset_timedout_connection resolver_timeout satisfy send_lowat "
            "send_timeout sendfile sendfile_max_chunk server_name_in_redirect server_tokens "
            "subrequest_output_buffer_size tcp_nodelay tcp_nopush types_hash_bucket_size types_hash_max_size"
        ),
        "HSL",
        checks.words,
    ),
    (
        (
            "client_header_buffer_size client_header_timeout connection_pool_size ignore_invalid_headers "
            "large_client_header_buffers merge_slashes request_pool_size underscores_in_headers"
        ),
        "HS",
        checks.words,
    ),
    (
        (
            "server_names_hash_bucket_size server_names_hash_max_size variables_hash_bucket_size "
            "variables_hash_max_size map_hash_bucket_size map_hash_max_size"
        ),
        "H",
        checks.words,
    ),
    ("limit_rate limit_rate_after default_type", "HSLI", checks.text),
    ("resolver", "HSL", checks.resolvers),
    ("root", "HSLI", checks.root),
    ("alias", "L", checks.root),
    ("index", "HSL", checks.index),
    ("try_files", "SL", checks.tried),
    ("error_page", "HSLI", checks.uris),
    ("internal", "L", checks.nothing),
    # Rewriting.
    ("rewrite", "SLI", checks.rewriting),
    ("return", "SLI", checks.text),
    ("set", "SLI", checks.assignment),
    ("break", "SLI", checks.nothing),
    ("rewrite_log uninitialized_variable_warn", "HSLI", checks.words),
    # Headers and bodies.
    ("add_header add_trailer expires", "HSLI", checks.text),
    (
        (
            "gzip gzip_buffers gzip_comp_level gzip_http_version gzip_min_length gzip_proxied gzip_types "
            "gzip_vary gunzip gunzip_buffers gzip_static charset charset_types override_charset "
            "source_charset sub_filter_last_modified sub_filter_once sub_filter_types"
        ),
        "HSLI",
        checks.words,
    ),
    ("gzip_disable sub_filter", "HSL", checks.text),
    ("autoindex autoindex_exact_size autoindex_format autoindex_localtime", "HSL", checks.words),
    # Who may come in, and how often.
    ("allow deny", "HSLX", checks.networks),
    ("auth_basic", "HSLX", checks.text),
    ("auth_basic_user_file", "HSLX", checks.file),
    ("auth_delay", "HSL", checks.words),
    ("auth_request mirror", "HSL", checks.uris),
    ("auth_request_set", "HSL", checks.assignment),
    ("mirror_request_body", "HSL", checks.words),
    (
        (
            "limit_conn limit_conn_dry_run limit_conn_log_level limit_conn_status limit_req "
            "limit_req_dry_run limit_req_log_level limit_req_status"
        ),
        "HSL",
        checks.words,
    ),
    ("limit_conn_zone limit_req_zone", "H", checks.text),
    ("secure_link secure_link_md5", "HSL", checks.text),
    ("valid_referers", "SL", checks.text),
    ("set_real_ip_from", "HSL", checks.networks),
    ("real_ip_header real_ip_recursive", "HSL", checks.words),
    # Other machines.
    ("proxy_pass", "LIX", checks.proxy_url),
    ("grpc_pass", "LI", checks.grpc_url),
    ("memcached_pass", "LI", checks.authority),
    ("proxy_bind grpc_bind", "HSL", checks.bound_address),
    (
        (
            "proxy_buffer_size proxy_buffering proxy_buffers proxy_busy_buffers_size proxy_connect_timeout "
            "proxy_force_ranges proxy_headers_hash_bucket_size proxy_headers_hash_max_size "
            "proxy_hide_header proxy_http_version proxy_ignore_client_abort proxy_ignore_headers "
            "proxy_intercept_errors proxy_limit_rate proxy_max_temp_file_size proxy_next_upstream "
            "proxy_next_upstream_timeout proxy_next_upstream_tries proxy_pass_header proxy_pass_request_body "
            "proxy_pass_request_headers proxy_read_timeout proxy_request_buffering proxy_send_lowat "
            "proxy_send_timeout proxy_socket_keepalive proxy_ssl_ciphers proxy_ssl_protocols "
            "proxy_ssl_server_name proxy_ssl_session_reuse proxy_ssl_verify proxy_ssl_verify_depth "
            "proxy_temp_file_write_size grpc_buffer_size grpc_connect_timeout grpc_hide_header "
            "grpc_ignore_headers grpc_intercept_errors grpc_next_upstream grpc_next_upstream_timeout "
            "grpc_next_upstream_tries grpc_pass_header grpc_read_timeout grpc_send_timeout "
            "grpc_socket_keepalive grpc_ssl_ciphers grpc_ssl_protocols grpc_ssl_server_name "
            "grpc_ssl_session_reuse grpc_ssl_verify grpc_ssl_verify_depth memcached_buffer_size "
            "memcached_connect_timeout memcached_next_upstream memcached_read_timeout memcached_send_timeout"
        ),
        "HSL",
        checks.words,
    ),
    (
        (
            "proxy_cookie_domain proxy_cookie_flags proxy_cookie_path "
            "proxy_method proxy_redirect proxy_set_body proxy_set_header "
            "proxy_ssl_name grpc_set_header grpc_ssl_name"
        ),
        "HSL",
        checks.text,
    ),
    (
        "proxy_ssl_trusted_certificate proxy_ssl_crl grpc_ssl_trusted_certificate grpc_ssl_crl",
        "HSL",
        checks.file,
    ),
    # TLS and HTTP/2.
    (
        (
            "ssl_buffer_size ssl_ciphers ssl_early_data ssl_ecdh_curve ssl_prefer_server_ciphers "
            "ssl_protocols ssl_session_cache ssl_session_tickets ssl_session_timeout ssl_stapling "
            "ssl_stapling_verify ssl_verify_client ssl_verify_depth http2_body_preread_size http2_chunk_size "
            "http2_max_concurrent_streams http2_recv_buffer_size http3_max_concurrent_streams"
        ),
        "HS",
        checks.words,
    ),
    ("ssl_client_certificate ssl_crl ssl_dhparam ssl_trusted_certificate", "HS", checks.file),
)

_WHOLE: Final[tuple[Row, ...]] = (
    ("server_name", "S", checks.text),
    ("listen", "S", checks.listening),
    ("http2 http3 ssl_reject_handshake", "HS", checks.words),
    ("log_format", "H", checks.text),
    ("access_log", "HSLIX", checks.scratch),
    ("error_log", "MHSL", checks.scratch),
    ("pid", "M", checks.scratch),
    ("client_body_temp_path proxy_temp_path", "HSL", checks.scratch),
    ("stub_status", "SL", checks.nothing),
    ("server", "U", checks.server_address),
    ("zone hash random keepalive keepalive_requests keepalive_time keepalive_timeout", "U", checks.text),
    ("ip_hash least_conn", "U", checks.nothing),
)

_AGENT: Final[tuple[Row, ...]] = (
    ("user", "M", checks.words),
    ("set", "S", checks.text),
    ("pid", "M", checks.own_path),
    ("env", "M", checks.text),
    ("error_log", "M", checks.own_path),
    ("access_log", "H", checks.own_path),
    ("include", "H", checks.own_include),
    (
        "client_body_temp_path proxy_temp_path fastcgi_temp_path uwsgi_temp_path scgi_temp_path",
        "H",
        checks.own_path,
    ),
    ("listen", "S", checks.own_listening),
    (
        "ssl_certificate ssl_certificate_key ssl_client_certificate ssl_trusted_certificate",
        "S",
        checks.own_key,
    ),
    ("auth_basic_user_file", "L", checks.own_path),
    ("auth_request_set", "L", checks.text),
    ("set", "L", checks.text),
    ("proxy_pass grpc_pass", "L", checks.own_target),
    ("proxy_ssl_certificate proxy_ssl_certificate_key", "L", checks.own_key),
    ("grpc_ssl_certificate grpc_ssl_certificate_key", "L", checks.own_key),
    ("proxy_ssl_trusted_certificate grpc_ssl_trusted_certificate", "L", checks.own_trust),
    ("proxy_cache_path", "H", checks.own_path),
    (
        (
            "proxy_cache proxy_cache_lock proxy_cache_min_uses proxy_cache_use_stale "
            "proxy_cache_background_update proxy_cache_methods proxy_cache_valid"
        ),
        "L",
        checks.words,
    ),
    ("proxy_cache_key proxy_cache_bypass proxy_no_cache", "L", checks.text),
    ("access_log", "S", checks.own_log),
    ("brotli brotli_types brotli_comp_level brotli_min_length", "L", checks.words),
    ("disable_symlinks", "HSL", checks.own_symlinks),
    ("root", "H", checks.exactly("/nonexistent")),
    # Streams: nobody writes raw text there.
    ("load_module", "M", checks.own_path),
    ("include", "T", checks.exactly("stream.d/*.conf")),
    ("log_format limit_conn_zone", "T", checks.text),
    ("map_hash_bucket_size map_hash_max_size", "T", checks.words),
    ("listen", "V", checks.listening),
    ("allow deny", "V", checks.networks),
    ("access_log", "V", checks.own_log),
    ("proxy_pass", "V", checks.own_group),
    (
        (
            "ssl_preread limit_conn proxy_protocol proxy_connect_timeout proxy_timeout proxy_responses "
            "proxy_download_rate proxy_upload_rate proxy_next_upstream_tries proxy_next_upstream_timeout"
        ),
        "V",
        checks.words,
    ),
    ("server", "W", checks.server_address),
    ("zone hash random", "W", checks.text),
    ("least_conn", "W", checks.nothing),
)

_BLOCKS: Final[dict[str, tuple[str, DirectiveContext, Check]]] = {
    "events": ("M", DirectiveContext.EVENTS, checks.nothing),
    "http": ("M", DirectiveContext.HTTP, checks.nothing),
    "server": ("H", DirectiveContext.SERVER, checks.nothing),
    "location": ("SL", DirectiveContext.LOCATION, checks.text),
    "if": ("SL", DirectiveContext.CONDITION, checks.text),
    "limit_except": ("L", DirectiveContext.EXCEPT, checks.words),
    "upstream": ("H", DirectiveContext.UPSTREAM, checks.words),
    "map": ("H", DirectiveContext.PAIRS, checks.text),
    "geo": ("H", DirectiveContext.PAIRS, checks.text),
    "split_clients": ("H", DirectiveContext.PAIRS, checks.text),
    "types": ("HSL", DirectiveContext.PAIRS, checks.nothing),
}
_STREAM_BLOCKS: Final[dict[str, tuple[str, DirectiveContext, Check]]] = {
    "stream": ("M", DirectiveContext.STREAM, checks.nothing),
    "server": ("T", DirectiveContext.STREAM_SERVER, checks.nothing),
    "upstream": ("T", DirectiveContext.STREAM_UPSTREAM, checks.words),
    "map": ("T", DirectiveContext.PAIRS, checks.text),
}


def _contexts(letters: str) -> frozenset[DirectiveContext]:
    return frozenset(_CONTEXTS[letter] for letter in letters)


def _table() -> dict[str, tuple[DirectiveEntry, ...]]:
    made: dict[str, tuple[DirectiveEntry, ...]] = {}
    for author, rows in ((TextAuthor.RAW, _RAW), (TextAuthor.WHOLE, _WHOLE), (TextAuthor.AGENT, _AGENT)):
        for names, letters, check in rows:
            entry = DirectiveEntry(contexts=_contexts(letters), check=check, author=author)
            for name in names.split():
                made[name] = (*made.get(name, ()), entry)
    return made


DIRECTIVES: Final = _table()
"""By name; several entries where several may write it with different values."""
BLOCKS: Final = tuple(
    (name, DirectiveEntry(contexts=_contexts(letters), check=check, author=author, opens=opens))
    for author, rows in ((TextAuthor.WHOLE, _BLOCKS), (TextAuthor.AGENT, _STREAM_BLOCKS))
    for name, (letters, opens, check) in rows.items()
)


def block_entry(name: str, context: DirectiveContext, author: TextAuthor) -> DirectiveEntry | None:
    """What a block is in a context when this author writes it; None if it may not stand there."""
    for known, entry in BLOCKS:
        if known == name and context in entry.contexts and entry.author <= author:
            return entry
    return None


def entries(name: str, author: TextAuthor) -> Sequence[DirectiveEntry]:
    """What a directive may be when this author writes it; none if it may not be written."""
    return [entry for entry in DIRECTIVES.get(name, ()) if entry.author <= author]
