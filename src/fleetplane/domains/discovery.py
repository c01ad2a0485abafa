"""Which domains are installed: every entry point of the group `fleetplane.domains`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from fleetplane.domains.declaration import Declaration
from fleetplane.kernel.errors import SettingsError

GROUP = "fleetplane.domains"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenDomain:
    """A domain that is installed and cannot be read."""

    name: str
    package: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredDomains:
    declarations: tuple[Declaration, ...]
    broken: tuple[BrokenDomain, ...] = ()

    def named(self, name: str) -> Declaration:
        """The declaration of that name; a broken one is refused with the package that brought it."""
        for declaration in self.declarations:
            if declaration.name == name:
                return declaration
        for broken in self.broken:
            if broken.name == name:
                raise SettingsError(
                    f"only: {name!r} of the package {broken.package} cannot be loaded: {broken.error}",
                    hint=f"update or uninstall {broken.package}, or leave the domain out with --only",
                )
        known = ", ".join(declaration.name for declaration in self.declarations)
        raise SettingsError(f"only: {name!r} is not one of {known}")


@cache
def installed() -> DiscoveredDomains:
    """Every domain of this installation, in order. Read once: packages do not come and go under a process."""
    return read(entry_points(group=GROUP))


def read(points: Iterable[EntryPoint]) -> DiscoveredDomains:
    """The declarations behind entry points. Two packages with one name, table or listener are refused."""
    found: dict[str, tuple[Declaration, str]] = {}
    broken: list[BrokenDomain] = []
    for point in sorted(set(points), key=lambda point: (point.name, point.value)):
        package = point.dist.name if point.dist is not None else point.value.partition(".")[0]
        try:
            declaration = point.load()
        except Exception as error:
            broken.append(
                BrokenDomain(name=point.name, package=package, error=f"{type(error).__name__}: {error}")
            )
            continue
        if not isinstance(declaration, Declaration) or declaration.name != point.name:
            broken.append(
                BrokenDomain(
                    name=point.name, package=package, error=f"{point.value} does not declare {point.name}"
                )
            )
            continue
        if point.name in found and found[point.name][0] != declaration:
            raise SettingsError(
                f"two packages bring a domain {point.name!r}: {found[point.name][1]} and {package}",
                hint="uninstall one of them",
            )
        found[point.name] = (declaration, package)
    _refuse_shared_listeners(found.values())
    declarations = sorted((one for one, _ in found.values()), key=lambda one: (one.order, one.name))
    return DiscoveredDomains(declarations=tuple(declarations), broken=tuple(broken))


def _refuse_shared_listeners(found: Iterable[tuple[Declaration, str]]) -> None:
    owners: dict[str, str] = {}
    for declaration, package in found:
        for listener in declaration.listeners:
            if (other := owners.setdefault(listener.name, package)) != package or listener.name == "web":
                raise SettingsError(
                    f"two packages bring a listener {listener.name!r}: {other} and {package}",
                    hint="uninstall one of them",
                )
