"""The options of a k3s installation, and the owner's policy for which of them an order may use. Pure.

Provisioning ends in commands that root runs on a board, so whatever an order can name is on a list of the
owner: installers with their checksum, folders, names of arguments, servers to join. Orders are checked when
they are accepted and again when they are carried out, because the lists may have become shorter meanwhile.
Every value becomes one quoted word of a command line or of an environment; no shell reads it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from fleetplane.domains.boards.ports import ProvisioningAction
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, PermissionDenied, SettingsError

VALUE_LIMIT = 1024
LIST_LIMIT = 64
CHANNEL = "stable"
DATA_DIR = "/var/lib/rancher/k3s"
KUBECONFIG = "/etc/rancher/k3s/k3s.yaml"

_VERSION = re.compile(r"v\d+\.\d+\.\d+(?:[+-][A-Za-z0-9.+-]+)?")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?")
_ARGUMENT = re.compile(r"[a-z0-9][a-z0-9-]*(?:=[\x20-\x7e]*)?")


class K3sOptions(msgspec.Struct, frozen=True, kw_only=True):
    installer: str = ""
    """One of those that the server's owner allows; the first of them when empty."""
    version: str = ""
    channel: str = CHANNEL
    data_dir: str = DATA_DIR
    write_kubeconfig: str = KUBECONFIG
    kubeconfig_mode: str = "600"
    cluster_cidr: str = ""
    service_cidr: str = ""
    cluster_dns: str = ""
    cluster_domain: str = ""
    flannel_backend: str = ""
    node_ip: str = ""
    node_external_ip: str = ""
    advertise_ip: str = ""
    tls_san: tuple[str, ...] = ()
    disable_components: tuple[str, ...] = ()
    kube_api_args: tuple[str, ...] = ()
    kube_controller_args: tuple[str, ...] = ()
    kube_scheduler_args: tuple[str, ...] = ()
    kubelet_args: tuple[str, ...] = ()
    kube_proxy_args: tuple[str, ...] = ()
    private_registry: str = ""
    default_local_storage: str = ""
    server_url: str = ""
    """Of an existing cluster to join; found out when the cluster's server is ours."""
    extra_args: tuple[str, ...] = ()
    """Each `name` or `name=value`, without dashes."""


def read(given: Mapping[str, str], *, version: str = "", channel: str = "") -> K3sOptions:
    """Options as a request has them; what nobody knows is refused, not dropped."""
    known = {field.name: field.type for field in msgspec.structs.fields(K3sOptions)}
    found: dict[str, object] = {}
    for name, value in given.items():
        if name not in known:
            raise InvalidArgument(f"there is no such option; {', '.join(sorted(known))} are", field=_at(name))
        if len(value) > VALUE_LIMIT or any(ord(character) < 32 for character in value):
            raise InvalidArgument(
                f"has more than {VALUE_LIMIT} characters, or control characters", field=_at(name)
            )
        found[name] = _listed(name, value) if known[name] is not str else value.strip()
    if version:
        found["version"] = version
    if channel:
        found["channel"] = channel
    options = msgspec.convert(found, K3sOptions)
    _check(options)
    return options


def _at(name: str) -> str:
    return f"k3s_config.{name[:64]}"


def _listed(name: str, value: str) -> list[str]:
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if len(parts) > LIST_LIMIT:
        raise InvalidArgument(f"has more than {LIST_LIMIT} entries", field=_at(name))
    return parts


def _check(options: K3sOptions) -> None:
    fits: Mapping[str, tuple[Callable[[str], bool], str]] = {
        "installer": (_is_source, "an https:// or file:// address"),
        "version": (_matches(_VERSION), "a version such as v1.31.4+k3s1"),
        "channel": (_matches(_WORD), "a channel such as stable"),
        "data_dir": (_is_path, "an absolute path"),
        "write_kubeconfig": (_is_path, "an absolute path"),
        "private_registry": (_is_path, "an absolute path"),
        "default_local_storage": (_is_path, "an absolute path"),
        "kubeconfig_mode": (
            _matches(re.compile(r"0?[4-7][0-7]0")),
            "an octal mode without rights for others",
        ),
        "cluster_cidr": (_are(ipaddress.ip_network), "networks"),
        "service_cidr": (_are(ipaddress.ip_network), "networks"),
        "cluster_dns": (_are(ipaddress.ip_address), "addresses"),
        "node_ip": (_are(ipaddress.ip_address), "addresses"),
        "node_external_ip": (_are(ipaddress.ip_address), "addresses"),
        "advertise_ip": (_are(ipaddress.ip_address), "an address"),
        "cluster_domain": (_matches(_NAME), "a domain"),
        "flannel_backend": (_matches(_WORD), "a word such as vxlan"),
        "server_url": (lambda value: value.startswith("https://"), "an https:// address"),
    }
    for name, (fitting, words) in fits.items():
        value = getattr(options, name)
        if value and not fitting(value):
            raise InvalidArgument(f"{value[:80]!r} is not {words}", field=_at(name))
    for name, pattern in (
        ("tls_san", re.compile(r"[A-Za-z0-9:.*-]+")),
        ("disable_components", _WORD),
        ("extra_args", _ARGUMENT),
        ("kube_api_args", _ARGUMENT),
        ("kube_controller_args", _ARGUMENT),
        ("kube_scheduler_args", _ARGUMENT),
        ("kubelet_args", _ARGUMENT),
        ("kube_proxy_args", _ARGUMENT),
    ):
        for value in getattr(options, name):
            if not pattern.fullmatch(value):
                raise InvalidArgument(f"{value[:80]!r} cannot stand there", field=_at(name))


def _matches(pattern: re.Pattern[str]) -> Callable[[str], bool]:
    return lambda value: pattern.fullmatch(value) is not None


def _is_path(value: str) -> bool:
    return value.startswith("/") and ".." not in value.split("/")


def _is_source(value: str) -> bool:
    return value.startswith(("https://", "file:///"))


def _are(kind: Callable[[str], object]) -> Callable[[str], bool]:
    def fitting(value: str) -> bool:
        try:
            for part in value.split(","):
                kind(part)
        except ValueError:
            return False
        return True

    return fitting


# As arguments.


def server_arguments(options: K3sOptions, *, address: str) -> list[str]:
    words = ["server", *_shared(options, address)]
    single = {
        "--advertise-address": options.advertise_ip or (options.node_ip or address),
        "--cluster-cidr": options.cluster_cidr,
        "--service-cidr": options.service_cidr,
        "--cluster-dns": options.cluster_dns,
        "--cluster-domain": options.cluster_domain,
        "--flannel-backend": options.flannel_backend,
        "--write-kubeconfig": options.write_kubeconfig,
        "--write-kubeconfig-mode": options.kubeconfig_mode,
        "--default-local-storage-path": options.default_local_storage,
    }
    words += [f"{name}={value}" for name, value in single.items() if value]
    many = {
        "--tls-san": options.tls_san,
        "--disable": options.disable_components,
        "--kube-apiserver-arg": options.kube_api_args,
        "--kube-controller-manager-arg": options.kube_controller_args,
        "--kube-scheduler-arg": options.kube_scheduler_args,
    }
    words += [f"{name}={value}" for name, values in many.items() for value in values]
    return [*words, *(f"--{argument}" for argument in options.extra_args)]


def agent_arguments(options: K3sOptions, *, address: str) -> list[str]:
    return ["agent", *_shared(options, address), *(f"--{argument}" for argument in options.extra_args)]


def _shared(options: K3sOptions, address: str) -> list[str]:
    single = {
        "--node-ip": options.node_ip or address,
        "--node-external-ip": options.node_external_ip,
        "--data-dir": options.data_dir,
        "--private-registry": options.private_registry,
    }
    words = [f"{name}={value}" for name, value in single.items() if value]
    words += [f"--kubelet-arg={value}" for value in options.kubelet_args]
    return words + [f"--kube-proxy-arg={value}" for value in options.kube_proxy_args]


PATHS: Final = ("/var/lib/rancher", "/etc/rancher")
_PATH = re.compile(r"(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)+")
"""Every part begins with a letter, digit or underscore: no `..`, no `//`, nothing that reads as an option."""
_INSTALLER = re.compile(r"(?P<url>(?:https://|file:///)[^\s#]+)#sha256=(?P<sha256>[0-9a-f]{64})")
_PATH_OPTIONS: Final = ("data_dir", "write_kubeconfig", "private_registry", "default_local_storage")
_ARGUMENT_OPTIONS: Final = {
    "extra_args": "k3s",
    "kube_api_args": "apiserver",
    "kube_controller_args": "controller-manager",
    "kube_scheduler_args": "scheduler",
    "kubelet_args": "kubelet",
    "kube_proxy_args": "proxy",
}
"""By the option's name, how the list of arguments calls the program that gets them."""
ARGUMENTS: Final = frozenset(
    {
        "k3s:node-label",
        "k3s:node-taint",
        "k3s:flannel-iface",
        "k3s:disable-cloud-controller",
        "k3s:disable-network-policy",
        "k3s:disable-kube-proxy",
        "k3s:disable-helm-controller",
        "k3s:secrets-encryption",
        "k3s:protect-kernel-defaults",
        "k3s:cluster-init",
        "apiserver:default-not-ready-toleration-seconds",
        "apiserver:default-unreachable-toleration-seconds",
        "apiserver:event-ttl",
        "apiserver:max-requests-inflight",
        "apiserver:service-node-port-range",
        "controller-manager:node-cidr-mask-size",
        "controller-manager:node-monitor-grace-period",
        "controller-manager:node-monitor-period",
        "controller-manager:terminated-pod-gc-threshold",
        "scheduler:v",
        "kubelet:eviction-hard",
        "kubelet:eviction-minimum-reclaim",
        "kubelet:eviction-soft",
        "kubelet:image-gc-high-threshold",
        "kubelet:image-gc-low-threshold",
        "kubelet:kube-reserved",
        "kubelet:max-pods",
        "kubelet:node-status-update-frequency",
        "kubelet:system-reserved",
        "proxy:conntrack-max-per-core",
        "proxy:masquerade-all",
        "proxy:proxy-mode",
    }
)
"""Arguments that name no file, program or address, and weaken no check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installer:
    url: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisioningPolicy:
    installers: tuple[Installer, ...] = ()
    """The first is used where an order names none; without any, nothing is installed."""
    paths: tuple[str, ...] = PATHS
    """Folders below which files of k3s may lie, and below which they are deleted."""
    servers: tuple[str, ...] = ()
    """`https://` addresses of clusters that are not ours and may be joined."""
    arguments: frozenset[str] = ARGUMENTS

    def installer(self, options: K3sOptions) -> Installer:
        """The installer that an order means; raises where the owner has not listed it."""
        for one in self.installers:
            if options.installer in ("", one.url):
                return one
        if not options.installer or not self.installers:
            raise PermissionDenied(
                "no installer of k3s is allowed on this server",
                field="k3s_config.installer",
                hint="the server's owner lists URL#sha256=CHECKSUM in boards.k3s_installers",
                details={"cause": "installer"},
            )
        raise PermissionDenied(
            f"{options.installer[:200]!r} is not one of the installers that this server's owner allows:"
            f" {', '.join(one.url for one in self.installers)}",
            field="k3s_config.installer",
            hint="boards.k3s_installers lists them",
            details={"cause": "installer"},
        )

    def require(self, options: K3sOptions, action: ProvisioningAction) -> None:
        """Raise for the first thing in an order that the owner does not allow."""
        self._check_paths(options)
        self._check_arguments(options)
        if options.server_url:
            self.require_server(options.server_url)
        if action is ProvisioningAction.PROVISION:
            self.installer(options)

    def require_server(self, url: str) -> None:
        if url.rstrip("/") not in {one.rstrip("/") for one in self.servers}:
            raise PermissionDenied(
                f"{url[:200]!r} is not a server that boards may join",
                field="k3s_config.server_url",
                hint="whoever runs that cluster has root on the board: the server's owner lists it in"
                " boards.k3s_servers",
                details={"cause": "server"},
            )

    def _check_paths(self, options: K3sOptions) -> None:
        for name in _PATH_OPTIONS:
            value = getattr(options, name)
            if value and not _is_below(value, self.paths):
                raise PermissionDenied(
                    f"{value[:200]!r} is not below {', '.join(self.paths) or 'any allowed folder'}",
                    field=f"k3s_config.{name}",
                    hint="the server's owner lists more folders in boards.k3s_paths",
                    details={"cause": "path"},
                )

    def _check_arguments(self, options: K3sOptions) -> None:
        for option, program in _ARGUMENT_OPTIONS.items():
            for argument in getattr(options, option):
                name = f"{program}:{argument.partition('=')[0]}"
                if name not in self.arguments:
                    raise PermissionDenied(
                        f"the argument {name} is not allowed on this server",
                        field=f"k3s_config.{option}",
                        hint="the server's owner lists more in boards.k3s_arguments",
                        details={"cause": "argument"},
                    )


def _is_below(value: str, roots: Iterable[str]) -> bool:
    return _PATH.fullmatch(value) is not None and any(value.startswith(f"{root}/") for root in roots)


# From settings.


def from_settings(
    *, installers: Iterable[str], paths: Iterable[str], servers: Iterable[str], arguments: Iterable[str]
) -> ProvisioningPolicy:
    """The policy that the owner wrote down; `SettingsError` names what is wrong with it."""
    found = []
    for text in installers:
        match = _INSTALLER.fullmatch(text)
        if match is None:
            raise SettingsError(
                f"boards.k3s_installers: {text[:200]!r} is not https://…#sha256=CHECKSUM (64 hex digits)"
            )
        found.append(Installer(url=match["url"], sha256=match["sha256"]))
    roots = tuple(path.rstrip("/") for path in paths)
    for root in roots:
        if _PATH.fullmatch(root) is None or root.count("/") < 2:
            raise SettingsError(
                f"boards.k3s_paths: {root[:200]!r} is not an absolute path of two parts or more"
            )
    for url in servers:
        if not url.startswith("https://"):
            raise SettingsError(f"boards.k3s_servers: {url[:200]!r} is not an https:// address")
    return ProvisioningPolicy(
        installers=tuple(found),
        paths=roots,
        servers=tuple(servers),
        arguments=ARGUMENTS | _arguments(arguments),
    )


def _arguments(given: Iterable[str]) -> frozenset[str]:
    programs = set(_ARGUMENT_OPTIONS.values())
    for text in given:
        program, _, name = text.partition(":")
        if program not in programs or re.fullmatch(r"[a-z0-9][a-z0-9-]*", name) is None:
            raise SettingsError(
                f"boards.k3s_arguments: {text[:200]!r} is not PROGRAM:NAME; programs are"
                f" {', '.join(sorted(programs))}"
            )
    return frozenset(given)


def confirmed_address(number: int, *, recorded: str, reported: str, given: Mapping[int, str]) -> str:
    """Where SSH goes for a board: what a person said, never what the board says of itself."""
    address = given.get(number) or recorded
    if not address:
        said = (
            f"board {number} says that its address is {reported}"
            if reported
            else f"board {number} has no address"
        )
        raise FailedPrecondition(
            f"{said}, and nobody has confirmed one",
            field="addresses",
            hint=f"look at the board, then give the address with the order (--address {number}=ADDRESS) or"
            " write it down with PUT /nodes/{id}",
            details={"cause": "address"},
        )
    return address
