"""What an installation of k3s can be told, under the names that people know. Pure.

Every value ends up as one word of a command line or of an environment, quoted; nothing that
anybody writes here is ever read by a shell. What of it may be asked for is decided by `policy`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping

import msgspec

from fleetplane.kernel.errors import InvalidArgument

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
