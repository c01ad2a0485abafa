"""Which domains there are, and how each is built from the settings.

A domain is imported only if it is enabled: what a server does not run costs it neither memory
nor start-up time.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fleetplane import __version__
from fleetplane.domains.blueprint import Blueprint, Domain, Kernel
from fleetplane.kernel.access import Role
from fleetplane.kernel.objects import LocalObjects, Objects
from fleetplane.sections.domains import ProxySettings
from fleetplane.settings import Settings

if TYPE_CHECKING:
    from fleetplane.domains.proxies.acme.side import AcmeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A domain that can be had."""

    blueprint: Callable[[], Blueprint]
    build: Callable[[Settings, Kernel], Coroutine[None, None, Domain]]


def _gpu_blueprint() -> Blueprint:
    from fleetplane.domains.gpus.domain import BLUEPRINT

    return BLUEPRINT


async def _gpus(settings: Settings, kernel: Kernel) -> Domain:
    from fleetplane.domains.gpus.domain import GpuDomain

    return GpuDomain(
        kernel,
        settings.gpus.policy(),
        dialect=settings.listeners.device_api.dialect,
        version=__version__,
        node=settings.gpus.node or socket.gethostname(),
    )


def _instance_blueprint() -> Blueprint:
    from fleetplane.domains.instances.domain import BLUEPRINT

    return BLUEPRINT


async def _instances(settings: Settings, kernel: Kernel) -> Domain:
    from fleetplane.domains.instances.domain import InstanceDomain, InstanceOptions
    from fleetplane.domains.instances.groups import SilencePolicy
    from fleetplane.kernel.identity.signing import SigningKeys

    wanted = settings.instances
    nonces = await SigningKeys.load_or_create(
        kernel.store, kernel.master, kernel.clock, purpose="registration-nonce", algorithm="EdDSA"
    )
    options = InstanceOptions(
        shard=wanted.shard,
        state_directory=settings.state_directory / "instances",
        environment=settings.inherited,
        provider=wanted.provider,
        drain_on_scale_down=wanted.drain_on_scale_down,
        first_generation_tenants=frozenset(wanted.first_generation_tenants),
        silence=SilencePolicy(
            silence_share=wanted.silence_share,
            silence_window_seconds=wanted.silence_window_seconds,
            silence_hold_seconds=wanted.silence_hold_seconds,
        ),
        machine=wanted.machine,
        userdata_hosts=frozenset(wanted.userdata_hosts),
        advertise_listeners=wanted.advertise == "listeners",
        version=__version__,
    )
    return InstanceDomain(kernel, _objects(settings), nonces, options)


def _objects(settings: Settings) -> Objects:
    """Where configuration documents, secrets and stored files of instances lie."""
    wanted = settings.instances
    if wanted.storage == "file":
        return LocalObjects(Path(wanted.directory or Path(settings.data_dir) / "objects"))
    from fleetplane.kernel.objects.s3 import S3Bucket, StoreObjects

    return StoreObjects(
        S3Bucket(
            bucket=wanted.bucket,
            region=wanted.region,
            endpoint=wanted.endpoint,
            prefix=wanted.prefix,
            access_key_id=wanted.access_key_id,
            secret_access_key=wanted.secret_access_key,
        )
    )


def _proxy_blueprint() -> Blueprint:
    from fleetplane.domains.proxies.domain import BLUEPRINT

    return BLUEPRINT


async def _proxies(settings: Settings, kernel: Kernel) -> Domain:
    from fleetplane.domains.proxies import options as proxy_options
    from fleetplane.domains.proxies.controller import AgentPolicy
    from fleetplane.domains.proxies.domain import ProxyDomain
    from fleetplane.domains.proxies.rest_side import RestOptions

    wanted = settings.proxies
    options = RestOptions(
        version=__version__,
        admin_email=wanted.admin_email,
        admin_password=wanted.first_password(),
        anyone_may_found=wanted.open_organizations,
        requests_per_minute=wanted.requests_per_minute,
    )
    policy = AgentPolicy(heartbeat_seconds=wanted.heartbeat_seconds)
    acme = _acme(wanted)
    proxy_options.check(options, acme, origins=wanted.event_origins)
    return await ProxyDomain.create(
        kernel, options, policy=policy, event_origins=wanted.event_origins, acme=acme
    )


def _acme(wanted: ProxySettings) -> AcmeOptions:
    from fleetplane.domains.proxies.acme.orders import AuthorityOptions
    from fleetplane.domains.proxies.acme.side import AcmeOptions
    from fleetplane.domains.proxies.acme.zone_file import read_zones

    authority = AuthorityOptions(
        directory_url=wanted.acme_directory,
        terms_agreed=wanted.acme_terms_agreed,
        contact_email=wanted.acme_email,
        ca_file=wanted.acme_ca_file,
        eab_key_id=wanted.acme_eab_key_id,
        eab_hmac_key=wanted.acme_eab_hmac_key,
        user_agent=f"fleetplane/{__version__}",
    )
    zones = read_zones(Path(wanted.dns_zones_file)) if wanted.dns_zones_file else {}
    return AcmeOptions(
        authority=authority,
        zones=zones,
        challenge_listen=wanted.challenge_listen,
        challenge_address=wanted.challenge_address,
    )


def _board_blueprint() -> Blueprint:
    from fleetplane.domains.boards.domain import BLUEPRINT

    return BLUEPRINT


async def _boards(settings: Settings, kernel: Kernel) -> Domain:
    from fleetplane.domains.boards.core import BoardOptions
    from fleetplane.domains.boards.domain import BoardDomain

    wanted = settings.boards
    options = BoardOptions(
        heartbeat_seconds=wanted.heartbeat_seconds,
        certificate_days=wanted.certificate_days,
        agent_port=wanted.agent_port,
        plain=bool(settings.listeners.boards_plain.addresses),
        server_names=wanted.server_names,
        controller_id=wanted.controller_id,
        unprotected_pins=frozenset(wanted.unprotected_pins),
        certificate_domains=wanted.certificate_domains,
        requests_per_minute=wanted.requests_per_minute,
    )
    return BoardDomain(kernel, options)


def _edge_blueprint() -> Blueprint:
    from fleetplane.domains.edge.domain import BLUEPRINT

    return BLUEPRINT


async def _edge(settings: Settings, kernel: Kernel) -> Domain:
    from fleetplane.domains.edge.dispatch import DispatchPolicy
    from fleetplane.domains.edge.domain import EdgeDomain, EdgeOptions
    from fleetplane.domains.edge.identity_policy import IdentityPolicy, ServerRole
    from fleetplane.domains.edge.stream_side import StreamOptions
    from fleetplane.domains.edge.verification import SealPolicy

    wanted = settings.edge
    identity = IdentityPolicy(
        role=ServerRole(wanted.role),
        node_token_seconds=wanted.node_token_days * 86_400.0,
        enrollment_seconds=wanted.enrollment_token_seconds,
        overlap_seconds=wanted.overlap_seconds,
        attests_per_minute=wanted.attests_per_minute,
        trusted_proxies=wanted.trusted_proxies,
        skew_seconds=wanted.skew_seconds,
    )
    streams = StreamOptions(
        stale_seconds=wanted.stale_seconds,
        seal=SealPolicy(skew_seconds=wanted.skew_seconds, strict=wanted.strict),
        dispatch=DispatchPolicy(in_flight=wanted.in_flight),
    )
    options = EdgeOptions(
        version=__version__,
        public_endpoint=wanted.public_endpoint,
        issuer=wanted.issuer,
        identity=identity,
        streams=streams,
        deadline_seconds=wanted.deadline_seconds,
        shipped_shapes=wanted.shipped_shapes,
    )
    return await EdgeDomain.create(kernel, options)


OFFERS: Mapping[str, Offer] = {
    "gpus": Offer(blueprint=_gpu_blueprint, build=_gpus),
    "instances": Offer(blueprint=_instance_blueprint, build=_instances),
    "proxies": Offer(blueprint=_proxy_blueprint, build=_proxies),
    "boards": Offer(blueprint=_board_blueprint, build=_boards),
    "edge": Offer(blueprint=_edge_blueprint, build=_edge),
}


def blueprints(settings: Settings) -> list[Blueprint]:
    found = [OFFERS[name].blueprint() for name in settings.domains]
    if not _operator_roles(found):
        return found
    from fleetplane.domains.operators.domain import BLUEPRINT

    return [*found, BLUEPRINT]


async def build(settings: Settings, kernel: Kernel) -> list[Domain]:
    # Together: at a first start each makes keys, in threads, and none needs what another makes.
    async with asyncio.TaskGroup() as building:
        tasks = [building.create_task(OFFERS[name].build(settings, kernel)) for name in settings.domains]
    domains = [task.result() for task in tasks]
    roles = _operator_roles(OFFERS[name].blueprint() for name in settings.domains)
    if not roles:
        return domains
    from fleetplane.domains.operators.domain import OperatorsDomain

    return [*domains, OperatorsDomain(kernel, roles=roles)]


def _operator_roles(found: Iterable[Blueprint]) -> set[Role]:
    return {role for blueprint in found for role in blueprint.operator_roles}
