"""DNS records at any of the providers that dns-lexicon speaks to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fleetplane.domains.proxies.acme.errors import IssuanceFailed
from fleetplane.domains.proxies.acme.workers import AcmeWorkers

TTL_SECONDS = 120
"""The shortest that most providers accept."""


class LexiconDns:
    """One zone at one provider.

    The zone is what the operator said. The library's own client would guess it instead, with a
    list that it downloads without a time limit; so its providers are used without that client.
    """

    def __init__(self, workers: AcmeWorkers, *, provider: str, zone: str, options: Mapping[str, str]) -> None:
        self._workers = workers
        self._provider = provider
        self._zone = zone.rstrip(".").lower()
        self._options = dict(options)

    def __repr__(self) -> str:
        return f"<LexiconDns {self._provider} {self._zone}>"

    async def present(self, name: str, value: str) -> None:
        await self._run(lambda provider: provider.create_record("TXT", name.rstrip("."), value))

    async def clear(self, name: str, value: str) -> None:
        await self._run(
            lambda provider: provider.delete_record(rtype="TXT", name=name.rstrip("."), content=value)
        )

    async def _run(self, call: Callable[[Any], Any]) -> None:
        try:
            await self._workers.run(self._call, call)
        except Exception as error:  # each provider has errors of its own, and no common base
            raise IssuanceFailed(
                f"the DNS provider {self._provider} refused: {type(error).__name__}: {error}"
            ) from error

    def _call(self, call: Callable[[Any], Any]) -> None:
        from lexicon._private.discovery import load_provider_module
        from lexicon.config import ConfigResolver

        settings = {
            "provider_name": self._provider,
            "domain": self._zone,
            "ttl": TTL_SECONDS,
            self._provider: self._options,
        }
        resolver = ConfigResolver().with_dict(settings)  # type: ignore[no-untyped-call]
        provider = load_provider_module(self._provider).Provider(resolver)
        provider.authenticate()
        try:
            call(provider)
        finally:
            provider.cleanup()


def known_provider(name: str) -> bool:
    """Whether the library has it, with all that it needs. Slow: looks at installed packages."""
    from lexicon._private.discovery import find_providers

    return find_providers().get(name, False)
