"""What an instance is given, rendered: text files, arguments for its provider, user data.

Secrets, stored objects and certificates come from elsewhere; here are only the kinds that are text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fleetplane.domains.instances.configuration import go_json as gojson
from fleetplane.domains.instances.configuration.merge import EffectiveGroup
from fleetplane.domains.instances.configuration.schema import Addresses, FileSection, InstancesDocument, Json
from fleetplane.domains.instances.configuration.templates import template as templates
from fleetplane.domains.instances.configuration.templates.template import TemplateData
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values import durations


def template_data(
    config: InstancesDocument,
    group: EffectiveGroup,
    *,
    instance_id: str,
    ca_cert: str,
    advertise: Addresses | None = None,
    hostname: str = "",
    fqdn: str = "",
    ip4: str = "",
    ip6: str = "",
    images: Mapping[str, str] | None = None,
    nonce: str | None = None,
) -> TemplateData:
    """The data for one instance. `advertise` replaces the configured addresses once hosts are known."""
    addresses, infra = advertise or config.shard.advertise, config.shard.infra
    return TemplateData(
        instance_id=instance_id,
        instance_kind=group.prefix,
        arch=group.arch,
        instance_type=group.instance_type,
        hostname=hostname,
        fqdn=fqdn,
        ip4=ip4,
        ip6=ip6,
        report_interval=durations.format(config.shard.health_check_interval_seconds),
        cluster_id=config.cluster.id,
        ca_cert=ca_cert,
        shard=config.shard.id,
        registration_addr=addresses.registration_addr,
        agent_addr=addresses.agent_addr,
        operator_addr=addresses.operator_addr,
        provider_kind=infra.provider,
        region=infra.region,
        zone=infra.zone,
        vars=group.vars,
        images={} if images is None else images,
        nonce=nonce,
    )


def for_user_data(data: TemplateData, *, nonce: str, report_interval_seconds: float) -> TemplateData:
    """The template data of user data, which also has the nonce and the machine's own interval, if any."""
    interval = durations.format(report_interval_seconds) if report_interval_seconds else data.report_interval
    return replace(data, nonce=nonce, report_interval=interval)


def render_text(text: str, data: TemplateData) -> str:
    return templates.compile(text).render(data.mapping()) if "{{" in text else text


def render_json(value: Json, data: TemplateData) -> Json:
    """The value with every string in it rendered. Keys stay as they are."""
    return _render(value, data.mapping())


def _render(value: Json, fields: Mapping[str, object]) -> Json:
    match value:
        case str():
            return templates.compile(value).render(fields) if "{{" in value else value
        case Mapping():
            return {key: _render(item, fields) for key, item in value.items()}
        case list() | tuple():
            return [_render(item, fields) for item in value]
        case _:
            return value


def render_file(file: FileSection, data: TemplateData) -> bytes:
    """The content of a file of kind env, json or string."""
    match file.kind, file.template:
        case "env", Mapping() as lines:
            return "\n".join(f"{key}={_env_value(key, lines[key], data)}" for key in sorted(lines)).encode()
        case "json", Mapping() as content:
            return gojson.dumps(render_json(content, data), indent=2).encode()
        case "string", str() as text:
            return render_text(text, data).encode()
        case _:
            raise InvalidArgument(f"a file of kind {file.kind} is not rendered from a template")


def _env_value(key: str, template: object, data: TemplateData) -> str:
    """Lines are not quoted, so a value of two lines would be two variables: never let one through."""
    assert isinstance(template, str)
    value = render_text(template, data)
    if "\n" in value or "\r" in value:
        raise InvalidArgument(f"the value of {key} has several lines, which an env file cannot hold")
    return value
