"""The store's promises about writes: atomic, conditional, unique, counted, answered when durable."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.shared.storekit import (
    KINDS,
    OTHER,
    SCOPE,
    THING,
    Spec,
    Status,
    audit_of,
    opened,
    put,
    put_together,
    remove,
)

from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import (
    AlreadyExists,
    Conflict,
    FleetplaneError,
    InvalidArgument,
    NotFound,
    SettingsError,
    Unavailable,
)
from fleetplane.kernel.resources import BODY_LIMIT_BYTES, Condition, Kind
from fleetplane.kernel.store import (
    ABSENT,
    Delete,
    Draft,
    Expect,
    Put,
    ReleaseClaim,
    Store,
    StoreSettings,
    Take,
    Transaction,
    UndeclaredChange,
)


async def test_a_put_is_read_back_with_its_counters(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        first = (await put(store, "one", 1)).value
        await put(store, "two", 1)
        second = (await put(store, "one", 2)).value

        assert store.get(THING, SCOPE, "one") == second
        assert (first.revision, first.created_revision, first.generation) == (1, 1, 1)
        assert (second.revision, second.created_revision, second.generation) == (3, 1, 2)
        assert second.uid == first.uid
        assert second.created_at_ns == first.created_at_ns <= second.updated_at_ns


async def test_a_transaction_is_atomic(tmp_path: Path) -> None:
    def change(draft: Draft) -> None:
        draft.put(THING, SCOPE, "one", spec=Spec(value=1))
        draft.claim(THING, SCOPE, "serial", "s1", "one")
        draft.put_secret("key", b"blob")
        raise ValueError("changed my mind")

    async with opened(tmp_path / "store.db") as store:
        with pytest.raises(ValueError, match="changed my mind"):
            await store.transact(change, actor="t", action="x", touches=[THING.key(SCOPE, "one")])
        assert store.get(THING, SCOPE, "one") is None
        assert store.claimed_by(THING, SCOPE, "serial", "s1") is None
        assert await store.get_secret("key") is None
        assert store.revision == 0


async def test_every_resource_of_a_transaction_has_a_revision_of_its_own(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        revision = await put_together(store, ["c", "b", "a"], 1)
        assert [thing.revision for thing in store.list(THING)] == [3, 2, 1]
        assert revision == store.revision == 3


async def test_a_transaction_is_a_contiguous_range_of_revisions_in_the_order_of_its_writes(
    tmp_path: Path,
) -> None:
    def change(draft: Draft) -> None:
        draft.put(THING, SCOPE, "x", spec=Spec(value=2))
        draft.put(THING, SCOPE, "y", spec=Spec(value=2))
        draft.put(THING, SCOPE, "x", spec=Spec(value=3))
        gone = draft.delete(THING, SCOPE, "x")
        reborn = draft.put(THING, SCOPE, "x", spec=Spec(value=4))
        assert (gone.revision, reborn.revision, reborn.created_revision) == (2, 4, 4)
        draft.delete(THING, SCOPE, "y")

    async with opened(tmp_path / "store.db") as store:
        await put(store, "x", 1)
        touches = [THING.key(SCOPE, "x"), THING.key(SCOPE, "y")]
        done = await store.transact(change, actor="t", action="change", touches=touches)
        watch = store.watch(THING, after=1)
        events = (await watch.next()).events
        # y came and went again: its number is left unused.
        assert [(event.revision, event.type) for event in events] == [(2, "DELETED"), (4, "ADDED")]
        assert done.revision == store.revision == watch.revision == 4


async def test_preconditions_are_checked_against_the_latest_state(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:

        async def expecting(expect: Expect) -> int:
            spec = Spec(value=store.revision + 10)
            done = await store.transact(
                lambda draft: draft.put(THING, SCOPE, "x", spec=spec, expect=expect),
                actor="t",
                action="put",
                touches=[THING.key(SCOPE, "x")],
            )
            return done.revision

        with pytest.raises(NotFound):
            await expecting(1)
        assert await expecting(ABSENT) == 1
        with pytest.raises(AlreadyExists):
            await expecting(ABSENT)
        assert await expecting(1) == 2
        with pytest.raises(Conflict, match="at revision 2, not 1"):
            await expecting(1)
        with pytest.raises(Conflict):
            await store.transact(
                lambda draft: draft.delete(THING, SCOPE, "x", expect=1),
                actor="t",
                action="delete",
                touches=[THING.key(SCOPE, "x")],
            )
        assert store.revision == 2


async def test_of_many_concurrent_conditional_writers_one_wins(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:

        def create(value: int) -> asyncio.Future[object]:
            return asyncio.ensure_future(
                store.transact(
                    lambda draft: draft.put(THING, SCOPE, "x", spec=Spec(value=value), expect=ABSENT),
                    actor="t",
                    action="put",
                    touches=[THING.key(SCOPE, "x")],
                )
            )

        answers = await asyncio.gather(*(create(value) for value in range(20)), return_exceptions=True)
        assert sum(isinstance(answer, AlreadyExists) for answer in answers) == 19
        assert store.revision == 1


async def test_a_claim_is_unique_and_names_what_is_taken(tmp_path: Path) -> None:
    def take(owner: str) -> Transaction:
        return Transaction(
            actor="t",
            action="claim",
            operations=[Take(kind=THING, scope=SCOPE, field="slug", value="nice", owner=owner)],
        )

    path = tmp_path / "store.db"
    async with opened(path) as store:
        assert (await store.apply(take("one"))).revision == 1
        assert (await store.apply(take("one"))).revision == 1  # it is one's already: nothing changes
        with pytest.raises(AlreadyExists, match="slug 'nice' of thing is taken") as refused:
            await store.apply(take("two"))
        assert refused.value.details["value"] == "nice"

    async with opened(path) as store:  # claims outlive the process
        assert store.claimed_by(THING, SCOPE, "slug", "nice") == "one"
        release = ReleaseClaim(kind=THING, scope=SCOPE, field="slug", value="nice", owner="one")
        with pytest.raises(Conflict):
            await store.apply(
                Transaction(
                    actor="t",
                    action="release",
                    operations=[
                        ReleaseClaim(kind=THING, scope=SCOPE, field="slug", value="nice", owner="two")
                    ],
                )
            )
        await store.apply(Transaction(actor="t", action="release", operations=[release]))
        await store.apply(take("two"))
        assert store.claimed_by(THING, SCOPE, "slug", "nice") == "two"


async def test_of_many_concurrent_claimers_one_wins(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:

        def claim(owner: str) -> Transaction:
            taking = Take(kind=THING, scope=SCOPE, field="jti", value="t1", owner=owner)
            return Transaction(actor=owner, action="redeem", operations=[taking])

        answers = await asyncio.gather(
            *(store.apply(claim(f"agent{number}")) for number in range(20)), return_exceptions=True
        )
        assert sum(isinstance(answer, AlreadyExists) for answer in answers) == 19
        assert store.claimed_by(THING, SCOPE, "jti", "t1") == "agent0"


async def test_a_claim_handed_over_in_one_transaction_ends_with_its_new_owner(tmp_path: Path) -> None:
    def hand_over(draft: Draft) -> None:
        draft.release(THING, SCOPE, "slug", "nice", "one")
        assert draft.claimed_by(THING, SCOPE, "slug", "nice") is None
        draft.claim(THING, SCOPE, "slug", "nice", "two")

    path = tmp_path / "store.db"
    async with opened(path) as store:
        await store.transact(
            lambda draft: draft.claim(THING, SCOPE, "slug", "nice", "one"), actor="t", action="x", touches=[]
        )
        await store.transact(hand_over, actor="t", action="x", touches=[])
    async with opened(path) as store:
        assert store.claimed_by(THING, SCOPE, "slug", "nice") == "two"


async def test_a_declarative_transaction_is_all_or_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        await put(store, "old", 1)
        operations: list[Put | Delete] = [
            Put(kind=THING, scope=SCOPE, name="new", spec=Spec(value=1), expect=ABSENT),
            Delete(kind=THING, scope=SCOPE, name="old", expect=99),
        ]
        with pytest.raises(Conflict):
            await store.apply(Transaction(actor="t", action="swap", operations=operations))
        assert [thing.name for thing in store.list(THING)] == ["old"]

        operations[1] = Delete(kind=THING, scope=SCOPE, name="old", expect=1)
        assert (await store.apply(Transaction(actor="t", action="swap", operations=operations))).revision == 3
        assert [thing.name for thing in store.list(THING)] == ["new"]


async def test_a_transaction_that_changes_nothing_takes_no_revision(tmp_path: Path) -> None:
    def there_and_back(draft: Draft) -> None:
        draft.put(THING, SCOPE, "x", spec=Spec(value=2))
        draft.put(THING, SCOPE, "x", spec=Spec(value=1))
        draft.put(THING, SCOPE, "fleeting", spec=Spec())
        draft.delete(THING, SCOPE, "fleeting")

    async with opened(tmp_path / "store.db") as store:
        before = (await put(store, "x", 1)).value
        again = await put(store, "x", 1)
        assert again.value == before
        assert again.revision == store.revision == 1
        done = await store.transact(
            there_and_back,
            actor="t",
            action="x",
            touches=[THING.key(SCOPE, "x"), THING.key(SCOPE, "fleeting")],
        )
        assert done.revision == 1
        assert store.statistics().commits == 1
        assert (await audit_of(store)).entries == 1


async def test_a_put_can_ask_for_a_new_revision_though_nothing_differs(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        before = (await put(store, "x", 1)).value
        watch = store.watch(THING)
        done = await store.transact(
            lambda draft: draft.put(THING, SCOPE, "x", spec=Spec(value=1), renew=True),
            actor="t",
            action="renew",
            touches=[THING.key(SCOPE, "x")],
        )
        assert (done.revision, done.value.revision, done.value.generation) == (2, 2, before.generation)
        assert store.get(THING, SCOPE, "x") == done.value
        assert [event.revision for event in (await watch.next()).events] == [2]


async def test_a_resource_made_again_is_another_one(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        first = (await put(store, "x", 1)).value
        buried = (await remove(store, "x")).value
        second = (await put(store, "x", 1)).value
        assert (buried.uid, buried.revision, buried.created_revision) == (first.uid, 2, 1)
        assert second.uid != first.uid
        assert (second.revision, second.created_revision, second.generation) == (3, 3, 1)
        with pytest.raises(NotFound):
            await remove(store, "y")


async def test_generation_counts_changes_of_spec_only(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:

        async def write(spec: Spec, ready: bool) -> int:
            done = await store.transact(
                lambda draft: draft.put(THING, SCOPE, "x", spec=spec, status=Status(ready=ready)),
                actor="t",
                action="put",
                touches=[THING.key(SCOPE, "x")],
            )
            return done.value.generation

        assert await write(Spec(value=1), False) == 1
        assert await write(Spec(value=1), True) == 1
        assert await write(Spec(value=2), True) == 2


async def test_labels_stay_unless_stated(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        touches = [THING.key(SCOPE, "x")]

        async def write(value: int, labels: dict[str, str] | None) -> dict[str, str]:
            done = await store.transact(
                lambda draft: draft.put(THING, SCOPE, "x", spec=Spec(value=value), labels=labels),
                actor="t",
                action="put",
                touches=touches,
            )
            return done.value.labels

        assert await write(1, {"a": "b"}) == {"a": "b"}
        assert await write(2, None) == {"a": "b"}
        assert await write(3, {}) == {}


async def test_a_draft_sees_earlier_transactions_of_its_group(tmp_path: Path) -> None:
    def count(draft: Draft) -> int:
        found = draft.get(THING, SCOPE, "counter")
        value = 1 if found is None else found.spec.value + 1
        assert len(draft.list(THING, "org")) == (0 if found is None else 1)
        draft.put(THING, SCOPE, "counter", spec=Spec(value=value))
        assert [thing.spec.value for thing in draft.list(THING)] == [value]
        return value

    async with opened(tmp_path / "store.db") as store:
        key = THING.key(SCOPE, "counter")
        answers = await asyncio.gather(
            *(store.transact(count, actor="t", action="count", touches=[key]) for _ in range(100))
        )
        assert [answer.value for answer in answers] == list(range(1, 101))
        assert [answer.revision for answer in answers] == list(range(1, 101))
        assert store.statistics().commits < 10


async def test_an_unannounced_change_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        with pytest.raises(UndeclaredChange, match="thing org/a/x"):
            await store.transact(
                lambda draft: draft.put(THING, SCOPE, "x", spec=Spec()), actor="t", action="x", touches=[]
            )
        assert store.get(THING, SCOPE, "x") is None


async def test_a_change_that_would_wait_is_refused(tmp_path: Path) -> None:
    async def change(draft: Draft) -> None:
        draft.put(THING, SCOPE, "x", spec=Spec())

    async with opened(tmp_path / "store.db") as store:
        with pytest.raises(TypeError, match="plain function"):
            await store.transact(change, actor="t", action="x", touches=[THING.key(SCOPE, "x")])


@pytest.mark.parametrize(
    ("scope", "name"),
    [(SCOPE, ""), (SCOPE, "a\0b"), (SCOPE, "x" * 1025), (SCOPE, "\ud800"), ("s" * 1025, "x")],
)
async def test_an_address_that_cannot_be_kept_is_refused(tmp_path: Path, scope: str, name: str) -> None:
    async with opened(tmp_path / "store.db") as store:
        with pytest.raises(InvalidArgument):
            await put(store, name, scope=scope)


async def test_any_other_name_is_kept_exactly(tmp_path: Path) -> None:
    names = ["a/b", "line\nbreak", "é" * 253, "🖥️", " ", "x" * 1024, "%_'\""]
    path = tmp_path / "store.db"
    async with opened(path) as store:
        for name in names:
            await put(store, name, 1)
    async with opened(path) as store:
        assert sorted(names) == [thing.name for thing in store.list(THING)]


async def test_a_resource_too_large_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        with pytest.raises(InvalidArgument, match="more than"):
            await put(store, "x", padding="x" * BODY_LIMIT_BYTES)
        assert store.list(THING) == ()


async def test_lists_are_by_whole_scope_segments_and_in_order(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        for scope, name in [
            ("org/b", "1"),
            ("org/a", "2"),
            ("org/a", "1"),
            ("org/a/x", "1"),
            ("org/a-b", "1"),
        ]:
            await put(store, name, scope=scope)
        assert [(t.scope, t.name) for t in store.list(THING, "org/a")] == [
            ("org/a", "1"),
            ("org/a", "2"),
            ("org/a/x", "1"),
        ]
        assert len(store.list(THING)) == len(store.list(THING, "org")) == 5
        assert store.list(THING, "org/c") == ()
        assert store.list(THING, "or") == ()


async def test_a_list_is_the_same_object_until_its_kind_changes(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        await put(store, "x")
        before = store.list(THING)
        await put(store, "y", kind=OTHER)
        assert store.list(THING) is before
        assert store.kind_revision(THING) == 1
        await put(store, "y")
        assert [thing.name for thing in store.list(THING)] == ["x", "y"]
        assert [thing.name for thing in before] == ["x"]


async def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with opened(path) as store:
        for number in range(30):
            await put(store, f"n{number}", number)
        await put(store, "gone", kind=OTHER)
        await remove(store, "gone", kind=OTHER)
        await store.transact(
            lambda draft: draft.put(
                THING,
                SCOPE,
                "full",
                spec=Spec(value=7),
                status=Status(ready=True),
                conditions=[Condition(type="Ready", status="True", changed_at_ns=5, writer="w")],
                labels={"a": "b"},
            ),
            actor="t",
            action="put",
            touches=[THING.key(SCOPE, "full")],
        )
        before = list(store.list(THING)), store.revision, store.kind_revision(OTHER)
    async with opened(path) as store:
        assert (list(store.list(THING)), store.revision, store.kind_revision(OTHER)) == before
        assert (await put(store, "next")).revision == before[1] + 1


async def test_resources_of_a_kind_that_is_not_enabled_are_kept(tmp_path: Path) -> None:
    settings = StoreSettings(path=tmp_path / "store.db")
    async with opened(settings.path) as store:
        await put(store, "x", kind=OTHER)
    async with Store.open(settings, kinds=[THING], clock=SystemClock()) as store:
        with pytest.raises(FleetplaneError, match="other is not among the kinds"):
            store.list(OTHER)
        await put(store, "y")
    async with opened(settings.path) as store:
        assert store.get(OTHER, SCOPE, "x") is not None


async def test_two_kinds_of_one_name_are_refused(tmp_path: Path) -> None:
    twin: Kind[Spec, Status] = Kind("thing", Spec, Status)
    with pytest.raises(SettingsError, match="two kinds"):
        async with Store.open(
            StoreSettings(path=tmp_path / "store.db"), kinds=[*KINDS, twin], clock=SystemClock()
        ):
            pass


async def test_secrets_are_durable_and_take_no_revision(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with opened(path) as store:
        await store.put_secret("ca/key", b"\x00sealed")
        await store.put_secret("other", b"1")
        await store.delete_secret("other", actor="admin")
        assert store.revision == 0
    async with opened(path) as store:
        assert await store.get_secret("ca/key") == b"\x00sealed"
        assert await store.get_secret("other") is None
        verdict = await audit_of(store)
        assert (verdict.intact, verdict.entries) == (True, 3)
        assert b"sealed" not in b"".join([row.entry async for row in store.audit()])


@pytest.mark.parametrize(("actor", "action"), [("", "x"), ("x", ""), ("x" * 1025, "x")])
async def test_every_transaction_has_an_actor_and_an_action(tmp_path: Path, actor: str, action: str) -> None:
    async with opened(tmp_path / "store.db") as store:
        with pytest.raises(InvalidArgument):
            await store.transact(lambda draft: None, actor=actor, action=action, touches=[])


async def test_a_closed_store_says_so(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        pass
    with pytest.raises(Unavailable):
        await put(store, "x")
    with pytest.raises(Unavailable):
        store.watch(THING)


async def test_what_was_accepted_before_closing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with opened(path, group_limit=3) as store:
        writes = [asyncio.ensure_future(put(store, f"n{number}")) for number in range(20)]
        await asyncio.sleep(0)
    assert [(await write).revision for write in writes] == list(range(1, 21))
    async with opened(path) as store:
        assert len(store.list(THING)) == 20


async def test_a_draft_counts_what_it_would_list(tmp_path: Path) -> None:
    counted: list[tuple[int, int]] = []

    def change(draft: Draft) -> None:
        def note() -> None:
            scopes = ("", SCOPE, "org", "org/a/x", "org/b")
            counted.extend((draft.count(THING, scope), len(draft.list(THING, scope))) for scope in scopes)

        note()
        draft.put(THING, SCOPE, "new", spec=Spec(value=1))
        draft.put(THING, "org/a/x", "below", spec=Spec(value=1))
        draft.put(THING, SCOPE, "kept", spec=Spec(value=2))
        note()
        draft.delete(THING, SCOPE, "kept")
        draft.delete(THING, SCOPE, "new")
        note()
        draft.put(THING, SCOPE, "kept", spec=Spec(value=3))
        note()

    async with opened(tmp_path / "store.db") as store:
        await put(store, "kept", 1)
        await put(store, "elsewhere", 1, scope="org/a-b")
        touches = [THING.key(SCOPE, "new"), THING.key("org/a/x", "below"), THING.key(SCOPE, "kept")]
        # Twice in one group, so that the second counts on top of what is not durable yet.
        first = store.transact(change, actor="tester", action="count", touches=touches)
        second = store.transact(change, actor="tester", action="count", touches=touches)
        await asyncio.gather(first, second)
    assert counted
    assert all(count == listed for count, listed in counted)
