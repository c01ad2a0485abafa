"""Which tenants the templates of a document, and the files in them, are for. Pure.

A template is for the tenants that it names. One that names none is for the tenants whose groups in the
document stand on it, and for nobody else: files and secrets hang on templates, so whoever may use a template
gets what hangs on it.
"""

from __future__ import annotations

from collections.abc import Collection

from fleetplane.domains.instances.configuration.schema import FileSection, InstancesDocument

EVERYONE = "*"


def template_is_for(config: InstancesDocument, name: str, tenant: str) -> bool:
    """Whether groups of the tenant may stand on the template; not if there is no such template."""
    template = config.templates.get(name)
    if template is None:
        return False
    if template.tenants:
        return named(template.tenants, tenant)
    return any(group.template == name for group in config.groups.get(tenant, {}).values())


def templates_for(config: InstancesDocument, tenant: str) -> list[str]:
    """The templates that a tenant's operators may know of."""
    return [name for name in config.templates if template_is_for(config, name, tenant)]


def files_for(files: dict[str, FileSection], tenant: str) -> dict[str, FileSection]:
    """The files of a template that a tenant's instances receive."""
    return {name: file for name, file in files.items() if not file.tenants or named(file.tenants, tenant)}


def named(tenants: Collection[str], tenant: str) -> bool:
    return tenant in tenants or EVERYONE in tenants
