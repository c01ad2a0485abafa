"""The table `[oidc]`: the OpenID provider that vouches for people, and what its groups may do here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from fleetplane.kernel.errors import SettingsError
from fleetplane.sections.base import Secret, SettingsSection

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]{1,128}")  # RFC 6749, scope-token
_GROUP_ROLE = re.compile(
    r"(?P<group>[^\x00-\x1f]{1,256})=(?P<role>[A-Za-z0-9._-]{1,128})@(?P<scope>/\S{0,600})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRole:
    """A role that everybody in a group of the provider holds at a scope."""

    group: str
    role: str
    scope: str


class OpenIDSettings(SettingsSection, frozen=True):
    issuer: str = ""
    """The provider, such as `https://id.example/realms/staff`; empty: there is none."""
    client_id: str = ""
    client_secret: Secret = ""
    """Empty, with an empty `client_secret_file`: a public client, which PKCE alone protects."""
    client_secret_file: str = ""
    """A file with the secret; read at each sign-in, so that it can be changed without a restart."""
    scopes: tuple[str, ...] = ("openid", "profile", "email")
    groups_claim: str = "groups"
    """The claim of the ID token that lists a person's groups."""
    roles: tuple[str, ...] = ()
    """`GROUP=ROLE@SCOPE`, such as `sre=operator@/tenants/acme`."""
    server_url: str = ""
    """This server's address as browsers reach it. Empty: the web listener's, if it is a loopback one."""
    name: str = ""
    """What people are shown; empty: the issuer's host."""
    ca_file: str = ""
    """Authorities that vouch for the provider, in PEM; empty: those of this system."""
    new_accounts: bool = True
    """Whether a person whom the provider vouches for the first time gets an account, which holds no role."""

    def __post_init__(self) -> None:
        list(self.group_roles())
        if not self.issuer:
            return
        check_url("oidc.issuer", self.issuer)
        if not self.client_id:
            raise SettingsError("oidc.client_id: must not be empty where oidc.issuer is set")
        if self.client_secret and self.client_secret_file:
            raise SettingsError("oidc.client_secret_file: a secret is given already, as oidc.client_secret")
        if "openid" not in self.scopes or not all(_SCOPE.fullmatch(one) for one in self.scopes):
            raise SettingsError("oidc.scopes: must have openid, and words without spaces and quotes only")
        if self.server_url:
            parts = check_url("oidc.server_url", self.server_url)
            if parts.path.strip("/"):
                raise SettingsError(
                    "oidc.server_url: is an address without a path, such as https://fleet.example"
                )

    def group_roles(self) -> Iterator[GroupRole]:
        """What the provider's groups hold."""
        for text in self.roles:
            found = _GROUP_ROLE.fullmatch(text)
            if found is None:
                raise SettingsError(
                    f"oidc.roles: {text!r} is not GROUP=ROLE@SCOPE, such as sre=operator@/tenants/acme"
                )
            yield GroupRole(group=found["group"], role=found["role"], scope=found["scope"])

    @property
    def shown_name(self) -> str:
        return self.name or urlsplit(self.issuer).hostname or self.issuer


def check_url(key: str, url: str) -> SplitResult:
    """Refuse an address that is not of https, unless it stays on this machine."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise SettingsError(f"{key}: {url!r} is no address: {error}") from error
    if parts.scheme == "http" and parts.hostname not in LOOPBACK:
        raise SettingsError(f"{key}: {url!r} would send codes and tokens in plain text; use https://")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"{key}: {url!r} is no address that begins with https://")
    if parts.query or parts.fragment or parts.username is not None:
        raise SettingsError(f"{key}: {url!r} has more than an address")
    return parts
