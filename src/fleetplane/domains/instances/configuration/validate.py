"""The rules of a configuration that span more than one value: cluster, shard, groups and names.

Each rule gets the whole configuration and a report, and adds what it finds. None stops another, and the
report keeps silent about what was wrong already when the document was decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

import msgspec

from fleetplane.domains.instances.configuration.decode import RENAMED, nearest
from fleetplane.domains.instances.configuration.jsonc import Path
from fleetplane.domains.instances.configuration.ownership import EVERYONE, template_is_for
from fleetplane.domains.instances.configuration.problems import ProblemReport
from fleetplane.domains.instances.configuration.schema import (
    Addresses,
    EncryptionKey,
    InstancesDocument,
    SecretsSection,
)
from fleetplane.domains.instances.configuration.validate_content import (
    check_certificates,
    check_defaults,
    check_server_files,
    check_templates,
    check_texts,
)
from fleetplane.domains.instances.configuration.validate_network import (
    check_load_balancers,
    check_nat,
    check_tunnels,
    host_and_port_problem,
)

MAX_IDENTIFIER_CHARACTERS = 32

GOOGLE = "google-secret-manager"
SECRETS_BY_INFRA = {"aws": "aws-parameter-store", "google": GOOGLE}
SECRETS_PREFIXES = {
    "aws-parameter-store": "/nstance/",
    "aws-secrets-manager": "nstance/",
    GOOGLE: "nstance-",
    "object-storage": "secret/",
}

_IDENTIFIER = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_IMAGE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Rule = Callable[[InstancesDocument, ProblemReport], None]


def identifier_problem(text: str) -> str | None:
    """What is wrong with the id of a cluster, shard, tenant, group or pool."""
    if not text:
        return "must not be empty"
    if len(text) > MAX_IDENTIFIER_CHARACTERS:
        return f"is longer than {MAX_IDENTIFIER_CHARACTERS} characters"
    if not _IDENTIFIER.fullmatch(text):
        return "may hold lower-case letters, digits and, between them, hyphens"
    return "has two hyphens in a row" if "--" in text else None


def validate(config: InstancesDocument, report: ProblemReport) -> None:
    for rule in RULES:
        rule(config, report)


def resolve(config: InstancesDocument) -> InstancesDocument:
    """Fill in the defaults that follow from other values."""
    secrets = config.cluster.secrets
    provider = secrets.provider or SECRETS_BY_INFRA.get(config.shard.infra.provider, "")
    prefix = secrets.prefix or SECRETS_PREFIXES.get(provider, "")
    replace = msgspec.structs.replace
    secrets = replace(secrets, provider=provider, prefix=prefix)
    return replace(config, cluster=replace(config.cluster, secrets=secrets))


def _check_identifier(report: ProblemReport, path: Path, text: str, *, at_key: bool = False) -> None:
    problem = identifier_problem(text)
    if problem is not None:
        report.add(path, f"{text[:64]!r} {problem}", at_key=at_key)


def _check_identifiers(config: InstancesDocument, report: ProblemReport) -> None:
    _check_identifier(report, ("cluster", "id"), config.cluster.id)
    _check_identifier(report, ("shard", "id"), config.shard.id)
    for pool in config.shard.subnet_pools:
        _check_identifier(report, ("shard", "subnet_pools", pool), pool, at_key=True)
    for tenant, groups in config.groups.items():
        _check_identifier(report, ("groups", tenant), tenant, at_key=True)
        for key in groups:
            _check_identifier(report, ("groups", tenant, key), key, at_key=True)
    for name, template in config.templates.items():
        _check_tenants(report, ("templates", name, "tenants"), template.tenants)
        for file_name, file in template.files.items():
            _check_tenants(report, ("templates", name, "files", file_name, "tenants"), file.tenants)


def _check_tenants(report: ProblemReport, path: Path, tenants: Iterable[str]) -> None:
    for index, tenant in enumerate(tenants):
        if tenant != EVERYONE:
            _check_identifier(report, (*path, index), tenant)


def _check_secrets(config: InstancesDocument, report: ProblemReport) -> None:
    path: Path = ("cluster", "secrets")
    secrets = config.cluster.secrets
    provider = secrets.provider or SECRETS_BY_INFRA.get(config.shard.infra.provider, "")
    if not provider:
        if config.shard.infra.provider:
            message = f"'provider' is required when infrastructure is {config.shard.infra.provider!r}"
            report.add((*path, "provider"), message)
        return
    _check_project(report, path, provider, secrets.project_id)
    if provider == "object-storage" and secrets.encryption_key is None:
        report.add((*path, "encryption_key"), "'encryption_key' is required for provider object-storage")
    if provider != "object-storage" and secrets.encryption_key is not None:
        report.add((*path, "encryption_key"), f"only object-storage takes a key, not {provider}", at_key=True)
    for key_path, key in _keys(path, secrets):
        _check_project(report, key_path, key.provider, key.project_id)


def _keys(path: Path, secrets: SecretsSection) -> Iterable[tuple[Path, EncryptionKey]]:
    if secrets.encryption_key is not None:
        yield (*path, "encryption_key"), secrets.encryption_key
    for index, key in enumerate(secrets.old_encryption_keys):
        yield (*path, "old_encryption_keys", index), key


def _check_project(report: ProblemReport, path: Path, provider: str, project: str) -> None:
    if provider == GOOGLE and not project:
        report.add((*path, "project_id"), f"'project_id' is required for provider {GOOGLE}")
    if provider and provider != GOOGLE and project:
        report.add((*path, "project_id"), f"is only for provider {GOOGLE}", at_key=True)


def _check_addresses(config: InstancesDocument, report: ProblemReport) -> None:
    both: tuple[tuple[str, Addresses], ...] = (
        ("bind", config.shard.bind),
        ("advertise", config.shard.advertise),
    )
    for side, addresses in both:
        for name, address in msgspec.structs.asdict(addresses).items():
            problem = host_and_port_problem(address)
            if problem is not None:
                report.add(("shard", side, name), problem)
    seen: dict[str, str] = {}
    for name in ("registration_addr", "operator_addr", "agent_addr"):
        address = getattr(config.shard.bind, name)
        if address and address in seen:
            report.add(("shard", "bind", name), f"{address!r} is bound by {seen[address]} already")
        seen.setdefault(address, name)


def check_provider(config: InstancesDocument, report: ProblemReport, installed: Collection[str]) -> None:
    """A provider is one that is installed here: the server would have no machines from any other."""
    path: Path = ("shard", "infra", "provider")
    name, known = config.shard.infra.provider, sorted(installed)
    if not name or name in known:
        return
    if RENAMED.get(name) in known:
        report.add(path, f"{name!r} is called {RENAMED[name]!r} now")
    else:
        report.add(path, f"must be one of {', '.join(known)}, which are installed, not {name!r}")


def _check_shard(config: InstancesDocument, report: ProblemReport) -> None:
    shard = config.shard
    network = shard.leader_network
    if network is not None and shard.infra.provider == "aws" and not network.interface_id:
        report.add(("shard", "leader_network", "interface_id"), "'interface_id' is required on aws")
    collection, path = shard.garbage_collection, ("shard", "garbage_collection", "registration_timeout")
    if collection.registration_timeout_seconds <= collection.interval_seconds:
        report.add(path, "must be longer than garbage_collection.interval")
    for tenant, quota in shard.tenant_quotas.items():
        _check_identifier(report, ("shard", "tenant_quotas", tenant), tenant, at_key=True)
        wanted = sum(group.size or 0 for group in config.groups.get(tenant, {}).values())
        if quota < wanted:
            message = f"must not be less than the {wanted} instances that the tenant's groups here want"
            report.add(("shard", "tenant_quotas", tenant), message)
    expiry = shard.expiry
    if 0 < expiry.forced_age_seconds <= expiry.eligible_age_seconds:
        report.add(("shard", "expiry", "eligible_age"), "must be shorter than expiry.forced_age")
    jitter = shard.error_exit_jitter
    if jitter.max_delay_seconds < jitter.min_delay_seconds:
        report.add(("shard", "error_exit_jitter", "max_delay"), "must not be shorter than min_delay")
    election_parts = (("cluster", config.cluster.leader_election), ("shard", shard.leader_election))
    for where, election in election_parts:
        if election.leader_timeout_seconds <= election.frequent_interval_seconds:
            message = "must be longer than leader_election.frequent_interval"
            report.add((where, "leader_election", "leader_timeout"), message)


def _check_subnets(config: InstancesDocument, report: ProblemReport) -> None:
    shard = config.shard
    owners: dict[str, str] = {}
    for pool, subnets in shard.subnet_pools.items():
        path: Path = ("shard", "subnet_pools", pool)
        if not subnets:
            report.add(path, "a pool needs at least one subnet")
        for index, subnet in enumerate(subnets):
            if not subnet:
                report.add((*path, index), "must not be empty")
            elif subnet in owners:
                report.add((*path, index), f"subnet {subnet!r} is in pool {owners[subnet]!r} already")
            owners.setdefault(subnet, pool)
    for index, pool in enumerate(shard.dynamic_subnet_pools):
        check_known(report, ("shard", "dynamic_subnet_pools", index), "subnet pool", pool, shard.subnet_pools)


def check_known(report: ProblemReport, path: Path, what: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name and name not in names:
        report.add(path, f"there is no {what} {name!r}; {nearest(name, names)}")


def _check_groups(config: InstancesDocument, report: ProblemReport) -> None:
    pools = config.shard.subnet_pools
    for name, template in config.templates.items():
        check_known(report, ("templates", name, "subnet_pool"), "subnet pool", template.subnet_pool, pools)
    for tenant, groups in config.groups.items():
        for key, group in groups.items():
            path: Path = ("groups", tenant, key)
            check_known(report, (*path, "template"), "template", group.template, config.templates)
            if group.template in config.templates and not template_is_for(config, group.template, tenant):
                message = f"template {group.template!r} names the tenants it is for, and {tenant!r} is none"
                report.add((*path, "template"), message)
            check_known(report, (*path, "subnet_pool"), "subnet pool", group.subnet_pool, pools)
            for index, balancer in enumerate(group.load_balancers):
                where = (*path, "load_balancers", index)
                check_known(report, where, "load balancer", balancer, config.load_balancers)
            if group.size is not None and group.size < 0:
                report.add((*path, "size"), "must not be negative")
            check_texts(report, (*path, "args"), group.args)


def _check_images(config: InstancesDocument, report: ProblemReport) -> None:
    infra = config.shard.infra.provider
    for name, image in config.images.items():
        path: Path = ("images", name)
        if not _IMAGE_NAME.fullmatch(name):
            message = f"{name!r} must be letters, digits and underscores, to be written as .Image.{name}"
            report.add(path, message, at_key=True)
        if not image.filters:
            report.add((*path, "filters"), "an image needs at least one filter")
        if image.provider and infra and image.provider != infra:
            report.add((*path, "provider"), f"{image.provider!r} is not the shard's provider, {infra!r}")


RULES: tuple[Rule, ...] = (
    _check_identifiers,
    _check_secrets,
    _check_addresses,
    _check_shard,
    _check_subnets,
    _check_images,
    check_certificates,
    check_defaults,
    check_templates,
    check_server_files,
    check_load_balancers,
    check_tunnels,
    _check_groups,
    check_nat,
)
