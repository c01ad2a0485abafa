"""Keys of a document that are read and checked, and on which this server does not act. Pure.

Documents are shared with the first implementation, which has them all. Whoever writes one here learns what
decides instead. What is not in this table is acted on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fleetplane.domains.instances.configuration.jsonc import JsoncDocument, Path
from fleetplane.domains.instances.configuration.ownership import template_is_for
from fleetplane.domains.instances.configuration.problems import DocumentProblem, render
from fleetplane.domains.instances.configuration.schema import InstancesDocument

ANY = "*"
_NO_ELECTION = "a leader is elected among the servers that share a database, in times of their own"
_NO_WAKING = "no proxy wakes a sleeping tenant by its traffic"

IDLE: Mapping[tuple[str, ...], str] = {
    ("cluster", "storage"): "where objects lie is the server's setting instances.storage",
    ("cluster", "secrets"): "secrets lie in the server's storage, sealed under its master key; "
    "put them there with fleetplane instances secret put",
    ("cluster", "leader_election"): _NO_ELECTION,
    ("shard", "leader_election"): _NO_ELECTION,
    ("shard", "bind"): "where the server listens are its settings listeners.registration, operator and agent",
    ("shard", "advertise", "health_addr"): "health is told by the web listener, /healthz and /readyz",
    ("shard", "advertise", "election_addr"): _NO_ELECTION,
    ("shard", "shutdown_timeout"): "how long the server takes to end is its setting shutdown.grace_seconds",
    ("shard", "error_exit_jitter"): "no error of the document or the provider ends the server",
    ("shard", "garbage_collection", "interval"): "what is due is looked at when it is due",
    ("server", "files"): "the server keeps no files for itself",
    ("tunnels",): "tunnels are not run",
    ("templates", ANY, "size"): "a group that names no size has none",
    ("load_balancers", ANY, "target_groups", ANY, "proxy_port"): _NO_WAKING,
    ("load_balancers", ANY, "listeners", ANY, "proxy_port"): _NO_WAKING,
}


def warnings(document: JsoncDocument, config: InstancesDocument) -> tuple[DocumentProblem, ...]:
    """What stands in the document without effect, each with its place and what decides instead."""
    found = [_problem(document, path, f"has no effect: {why}") for path, why in _idle(document)]
    found += [
        _problem(
            document, ("templates", name), "is for no tenant: no group here stands on it, and it names none"
        )
        for name in config.templates
        if not config.templates[name].tenants and not _is_used(config, name)
    ]
    return tuple(sorted(found, key=lambda problem: (problem.line, problem.column)))


def _idle(document: JsoncDocument) -> Iterator[tuple[Path, str]]:
    for path in document.keys_at:
        for pattern, why in IDLE.items():
            if len(path) == len(pattern) and all(
                wanted in (ANY, part) for part, wanted in zip(path, pattern, strict=True)
            ):
                yield path, why


def _is_used(config: InstancesDocument, template: str) -> bool:
    return any(template_is_for(config, template, tenant) for tenant in config.groups)


def _problem(document: JsoncDocument, path: Path, message: str) -> DocumentProblem:
    place = document.key_position(path)
    return DocumentProblem(path=render(path), line=place.line, column=place.column, message=message)
