"""Whether a provider keeps the contract's promises: one suite for all of them.

Each check is an async function of a `Subject` that returns if the promise is kept and raises
`Broken` if not. Run every one of `CHECKS`, in any order, each against instances of its own:

    @pytest.mark.parametrize("check", CHECKS, ids=name_of)
    async def test_the_provider_keeps_its_promises(check, subject):
        await check(subject)

The checks make a few real instances and remove them again, also when they fail.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgspec

from fleetplane.domains.instances.providers.contract import (
    OWN_TAGS,
    PAGE_LIMIT_MIN,
    Created,
    CreateRequest,
    InstanceGone,
    ObservedMachine,
    Provider,
    ProviderStatus,
)

POLL_SECONDS = 0.05
CONCURRENT_CREATES = 4
PAGE_EXTRA = 2  # beyond one full page, so that there are two


class Broken(AssertionError):
    """A promise was not kept; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A kind of provider under test."""

    factory: Callable[[], Provider]
    """A new provider, configured but not started. Each one stands on the same infrastructure and state."""
    request: CreateRequest
    """A model that works there. Instance id and shard are replaced."""
    settle_seconds: float = 30.0
    """How long the infrastructure may take to make or remove an instance."""
    shard: str = field(default_factory=lambda: f"check-{secrets.token_hex(4)}")
    """Whose instances these are; a new one each time, so that checks do not meet."""


Check = Callable[[Subject], Awaitable[None]]


def expect(kept: bool, otherwise: str) -> None:
    if not kept:
        raise Broken(otherwise)


def name_of(check: Check) -> str:
    return getattr(check, "__name__", repr(check))


def new_instance_id(prefix: str = "chk") -> str:
    """A well-formed instance id: three letters and a version 7 UUID in 26 characters of base 32."""
    bits = time.time_ns() // 1_000_000 << 80 | secrets.randbits(80)
    bits = bits & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62
    padded = bits << 2
    alphabet = "0123456789abcdefghjkmnpqrstvwxyz"
    return prefix + "".join(alphabet[padded >> shift & 31] for shift in range(125, -1, -5))


class Trial:
    """A started provider, and the instances made with it."""

    def __init__(self, subject: Subject, provider: Provider) -> None:
        self.subject = subject
        self.provider = provider
        self._made: dict[str, str] = {}

    def request(self, **changes: object) -> CreateRequest:
        model = self.subject.request
        instance_id = new_instance_id(model.prefix or "chk")
        values = {"instance_id": instance_id, "shard": self.subject.shard, **changes}
        return msgspec.structs.replace(model, **values)

    async def create(self, request: CreateRequest | None = None) -> Created:
        request = request or self.request()
        self._made.setdefault(request.instance_id, "")
        created = await self.provider.create_instance(request)
        self._made[request.instance_id] = created.provider_id
        return created

    async def restart(self) -> None:
        await self.provider.close()
        self.provider = self.subject.factory()
        await self.provider.start()

    async def list_all(self, *, limit: int = 100, shard: str | None = None) -> list[ObservedMachine]:
        found: list[ObservedMachine] = []
        token = ""
        while True:
            page = await self.provider.list_instances(
                self.subject.request.cluster,
                self.subject.shard if shard is None else shard,
                limit=limit,
                next_token=token,
            )
            expect(len(page.items) <= limit, f"a page of at most {limit} had {len(page.items)} items")
            found += page.items
            token = page.next_token
            if not token:
                return found

    async def until(self, condition: Callable[[], Awaitable[bool]], otherwise: str) -> None:
        try:
            async with asyncio.timeout(self.subject.settle_seconds):
                while not await condition():  # noqa: ASYNC110  # infrastructure announces nothing
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise Broken(f"{otherwise} within {self.subject.settle_seconds:g} s") from None

    async def is_gone(self, instance_id: str, provider_id: str) -> bool:
        try:
            observed = await self.provider.get_instance_status(instance_id, provider_id)
        except InstanceGone:
            return True
        return observed.status is ProviderStatus.DELETED

    async def clean(self) -> None:
        for instance_id, provider_id in self._made.items():
            with suppress(InstanceGone):
                await self.provider.delete_instance(instance_id, provider_id)


@asynccontextmanager
async def trial(subject: Subject) -> AsyncIterator[Trial]:
    provider = subject.factory()
    problems = provider.validate()
    expect(not problems, f"validate() finds problems: {problems}")
    await provider.start()
    attempt = Trial(subject, provider)
    try:
        yield attempt
    finally:
        try:
            await attempt.clean()
        finally:
            await attempt.provider.close()


async def it_describes_itself(subject: Subject) -> None:
    provider = subject.factory()
    description = provider.describe()
    expect(description.name == provider.kind, "describe().name is not the provider's kind")
    expect(bool(description.version and description.summary), "describe() has no version or no summary")


async def a_created_instance_comes_to_run(subject: Subject) -> None:
    async with trial(subject) as attempt:
        created = await attempt.create()
        expect(bool(created.provider_id), "create_instance answered without a provider id")
        expect(created.launched_at_ns > 0, "create_instance answered without the time of launch")

        async def runs() -> bool:
            status = await attempt.provider.get_instance_status(created.instance_id, created.provider_id)
            return status.status is ProviderStatus.RUNNING

        await attempt.until(runs, "the instance did not come to run")


async def a_status_tells_whose_the_instance_is(subject: Subject) -> None:
    async with trial(subject) as attempt:
        request = attempt.request(tags={"colour": "green"})
        created = await attempt.create(request)
        seen = await attempt.provider.get_instance_status(created.instance_id, created.provider_id)
        expect(seen.instance_id == request.instance_id, "the status has another instance id")
        expect(seen.provider_id == created.provider_id, "the status has another provider id")
        expect((seen.cluster, seen.shard) == (request.cluster, request.shard), "the status has another owner")
        missing = {name for name, value in request.all_tags().items() if seen.tags.get(name) != value}
        expect(
            not missing, f"the status lacks the tags {sorted(missing)}; {OWN_TAGS} are the provider's to set"
        )


async def a_repeated_creation_names_the_same_instance(subject: Subject) -> None:
    async with trial(subject) as attempt:
        request = attempt.request(nonce="first")
        first = await attempt.create(request)
        again = await attempt.create(request)
        expect(again.provider_id == first.provider_id, "the same request made a second instance")
        other_nonce = msgspec.structs.replace(request, nonce="second", user_data=b"second")
        renewed = await attempt.create(other_nonce)
        expect(renewed.provider_id == first.provider_id, "a retry with another nonce made a second instance")
        expect(len(await attempt.list_all()) == 1, "more than one instance is listed")


async def simultaneous_repeats_make_one_instance(subject: Subject) -> None:
    async with trial(subject) as attempt:
        request = attempt.request()
        answers = await asyncio.gather(*(attempt.create(request) for _ in range(CONCURRENT_CREATES)))
        expect(
            len({each.provider_id for each in answers}) == 1, "simultaneous repeats got different instances"
        )
        expect(len(await attempt.list_all()) == 1, "simultaneous repeats made more than one instance")


async def simultaneous_creations_are_distinct(subject: Subject) -> None:
    async with trial(subject) as attempt:
        answers = await asyncio.gather(*(attempt.create() for _ in range(CONCURRENT_CREATES)))
        expect(len({each.provider_id for each in answers}) == CONCURRENT_CREATES, "two share a provider id")
        listed = {each.instance_id for each in await attempt.list_all()}
        expect(listed == {each.instance_id for each in answers}, "the list is not what was created")


async def an_instance_is_found_without_its_provider_id(subject: Subject) -> None:
    async with trial(subject) as attempt:
        created = await attempt.create()
        seen = await attempt.provider.get_instance_status(created.instance_id, "")
        expect(seen.provider_id == created.provider_id, "the status by instance id is of another instance")
        await attempt.provider.delete_instance(created.instance_id, "")
        await attempt.until(
            lambda: attempt.is_gone(created.instance_id, created.provider_id), "it did not go away"
        )


async def a_list_is_paged_and_complete(subject: Subject) -> None:
    async with trial(subject) as attempt:
        count = PAGE_LIMIT_MIN + PAGE_EXTRA
        made = {(await attempt.create()).instance_id for _ in range(count)}
        listed = [each.instance_id for each in await attempt.list_all(limit=PAGE_LIMIT_MIN)]
        expect(len(listed) == len(set(listed)), "an instance is on two pages")
        expect(set(listed) == made, "the pages together are not what was created")


async def a_list_holds_only_its_owners_instances(subject: Subject) -> None:
    async with trial(subject) as attempt:
        mine = await attempt.create()
        other_shard = f"{subject.shard}-x"
        theirs = await attempt.create(attempt.request(shard=other_shard))
        expect(
            [each.instance_id for each in await attempt.list_all()] == [mine.instance_id], "mine are mixed"
        )
        listed = [each.instance_id for each in await attempt.list_all(shard=other_shard)]
        expect(listed == [theirs.instance_id], "those of another shard are mixed")


async def a_deleted_instance_is_gone(subject: Subject) -> None:
    async with trial(subject) as attempt:
        created = await attempt.create()
        await attempt.provider.delete_instance(created.instance_id, created.provider_id)
        await attempt.until(
            lambda: attempt.is_gone(created.instance_id, created.provider_id), "it did not go away"
        )
        expect(await attempt.list_all() == [], "a deleted instance is still listed")
        await _expect_gone(
            attempt.provider.delete_instance(created.instance_id, created.provider_id),
            "deleting it a second time",
        )


async def an_unknown_instance_is_gone(subject: Subject) -> None:
    async with trial(subject) as attempt:
        provider, stranger = attempt.provider, new_instance_id()
        for provider_id in ("", "i-0123456789abcdef0"):
            await _expect_gone(
                provider.get_instance_status(stranger, provider_id), "the status of a stranger"
            )
            await _expect_gone(provider.delete_instance(stranger, provider_id), "deleting a stranger")


async def an_instance_is_not_deleted_under_anothers_name(subject: Subject) -> None:
    async with trial(subject) as attempt:
        one, other = await attempt.create(), await attempt.create()
        for instance_id in (new_instance_id(), other.instance_id):
            await _expect_gone(
                attempt.provider.delete_instance(instance_id, one.provider_id),
                "deleting by a provider id that belongs to another instance id",
            )
        for each in (one, other):
            gone = await attempt.is_gone(each.instance_id, each.provider_id)
            expect(not gone, "an instance was deleted under another's name")


async def a_restart_loses_nothing(subject: Subject) -> None:
    async with trial(subject) as attempt:
        if not attempt.provider.describe().durable:
            return  # it promises nothing here
        request = attempt.request()
        created = await attempt.create(request)
        await attempt.restart()
        seen = await attempt.provider.get_instance_status(created.instance_id, created.provider_id)
        expect(not seen.status.unhealthy, f"after a restart the instance is {seen.status}")
        listed = [each.provider_id for each in await attempt.list_all()]
        expect(listed == [created.provider_id], "after a restart the list has changed")
        again = await attempt.create(request)
        expect(again.provider_id == created.provider_id, "a retry after a restart made a second instance")
        await attempt.provider.delete_instance(created.instance_id, created.provider_id)
        await attempt.restart()
        gone = await attempt.is_gone(created.instance_id, created.provider_id)
        expect(
            gone or await _is_going(attempt.provider, created), "a restart brought a deleted instance back"
        )


async def _is_going(provider: Provider, created: Created) -> bool:
    seen = await provider.get_instance_status(created.instance_id, created.provider_id)
    return seen.status is ProviderStatus.DELETING


async def _expect_gone(call: Awaitable[object], what: str) -> None:
    try:
        await call
    except InstanceGone:
        return
    raise Broken(f"{what} did not raise InstanceGone")


CHECKS: tuple[Check, ...] = (
    it_describes_itself,
    a_created_instance_comes_to_run,
    a_status_tells_whose_the_instance_is,
    a_repeated_creation_names_the_same_instance,
    simultaneous_repeats_make_one_instance,
    simultaneous_creations_are_distinct,
    an_instance_is_found_without_its_provider_id,
    a_list_is_paged_and_complete,
    a_list_holds_only_its_owners_instances,
    a_deleted_instance_is_gone,
    an_unknown_instance_is_gone,
    an_instance_is_not_deleted_under_anothers_name,
    a_restart_loses_nothing,
)
