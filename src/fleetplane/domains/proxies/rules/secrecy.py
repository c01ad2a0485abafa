"""What of a workspace's configuration is shown to whom: secrets to those who may change them.

Whoever may only read gets the same document with what is, or looks like, a secret masked, as the audit
log has it. Settings are an administrator's, hosts an operator's, so each sees what they may write.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from fleetplane.domains.proxies.access import OPERATE, RAW, Access
from fleetplane.domains.proxies.kinds.records import SettingsSpec
from fleetplane.domains.proxies.rest.common import ProxyCall
from fleetplane.domains.proxies.rules.configuration import Difference
from fleetplane.fleet.masking import masked, without_secrets

T = TypeVar("T")
SETTINGS_SECTION = "settings"


class Secrecy:
    def __init__(self, access: Access) -> None:
        self._access = access

    def settings(self, call: ProxyCall, spec: SettingsSpec) -> SettingsSpec:
        return spec if self._access.may(call.caller, RAW, call.scope) else without_secrets(spec)

    def hosts(self, call: ProxyCall, view: T) -> T:
        """A virtual host, an upstream, or a document with nothing but such in it."""
        return view if self._access.may(call.caller, OPERATE, call.scope) else without_secrets(view)

    def document(self, call: ProxyCall, whole: T) -> T:
        """Anything that has settings beside hosts and upstreams."""
        if self._access.may(call.caller, RAW, call.scope):
            return whole
        if not self._access.may(call.caller, OPERATE, call.scope):
            return without_secrets(whole)
        fields: dict[str, Any] = msgspec.to_builtins(whole)
        if SETTINGS_SECTION in fields:
            fields[SETTINGS_SECTION] = masked(fields[SETTINGS_SECTION])
        return msgspec.convert(fields, type(whole))

    def differences(self, call: ProxyCall, found: Iterator[Difference]) -> Iterator[Difference]:
        raw, operate = (self._access.may(call.caller, right, call.scope) for right in (RAW, OPERATE))
        for one in found:
            if raw if one.section == SETTINGS_SECTION else operate:
                yield one
            else:
                yield msgspec.structs.replace(
                    one,
                    fields={
                        name: (masked(_plain(old), name), masked(_plain(new), name))
                        for name, (old, new) in one.fields.items()
                    },
                )


def _plain(value: object) -> Any:
    return msgspec.to_builtins(value)
