"""Fingerprints of a group: of what its instances must be told, and of what they must be replaced for."""

from __future__ import annotations

from hashlib import md5, sha256

from fleetplane.domains.instances.configuration.go_json import GoStruct, dumps
from fleetplane.domains.instances.configuration.merge import EffectiveGroup
from fleetplane.domains.instances.configuration.schema import FileSection, Userdata


def runtime_hash(group: EffectiveGroup) -> str:
    """The hash of what can be pushed to a running instance: vars and files."""
    files = {name: _file(file) for name, file in group.files.items()}
    return _sha256(GoStruct(vars=dict(group.vars), files=files))


def infra_hash(group: EffectiveGroup) -> str:
    """The hash of what an instance is made with: a change means a new machine."""
    facts = GoStruct(args=dict(group.args), instance_type=group.instance_type, subnet_pool=group.subnet_pool)
    if group.userdata is not None:
        facts["userdata"] = _userdata(group.userdata)
    facts.update(kind=group.prefix, arch=group.arch)
    return _sha256(facts)


def group_etag(group: EffectiveGroup) -> str:
    """The ETag of the configuration that operators see; instances do not change it."""
    shown = {
        "key": group.key,
        "tenant": group.tenant,
        "template": group.template,
        "size": group.size,
        "instance_type": group.stated.instance_type,
        "subnet_pool": group.stated.subnet_pool,
        # A group made at run time without vars has no map of them at all.
        "vars": dict(group.stated.vars) or ({} if group.is_static else None),
        "is_static": group.is_static,
    }
    return md5(dumps(shown).encode(), usedforsecurity=False).hexdigest()


def _sha256(facts: GoStruct) -> str:
    return "sha256:" + sha256(dumps(facts).encode()).hexdigest()


def _file(file: FileSection) -> GoStruct:
    key = GoStruct(source=file.key.source, name=file.key.name) if file.key is not None else None
    facts = GoStruct(kind=file.kind, source=file.source or None, template=file.template, key=key)
    return _without_nothing(facts)


def _userdata(userdata: Userdata) -> GoStruct:
    return _without_nothing(
        GoStruct(source=userdata.source or None, encoding=userdata.encoding or None, content=userdata.content)
    )


def _without_nothing(facts: GoStruct) -> GoStruct:
    return GoStruct({name: value for name, value in facts.items() if value is not None})
