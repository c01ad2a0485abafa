"""What can happen to a cluster under load. Each returns when every server has acknowledged writes again."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

from support.cluster.load import Load, NotDone
from support.cluster.members import DEADLINE_SECONDS, Member

from fleetplane.kernel.store.engines.postgres_line import connect
from fleetplane.kernel.store.engines.postgres_schema import TAKE_LOCK

Failure = Callable[[Load, random.Random], Awaitable[None]]
WAITING = (
    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


async def kill_active(load: Load, _: random.Random) -> None:
    active = await load.cluster.the_active()
    await load.cluster.kill(active)
    await load.goes_on()


async def kill_standby(load: Load, chance: random.Random) -> None:
    await load.cluster.the_active()
    await load.cluster.kill(chance.choice(load.cluster.standbys))
    await load.goes_on()


async def kill_anyone(load: Load, chance: random.Random) -> None:
    """And go on as soon as the others acknowledge writes: the next may die while this one starts."""
    victim = chance.choice(load.cluster.members)
    await load.cluster.kill(victim)
    await load.goes_on(*(one for one in load.cluster.members if one is not victim))


async def stop_active(load: Load, _: random.Random) -> None:
    """Until another one has taken over; then it goes on, learns that, and ends."""
    active = await load.cluster.the_active()
    process = active.process
    active.signal(signal.SIGSTOP)
    await load.cluster.until(lambda: load.cluster.active is not active)
    await load.goes_on(*(one for one in load.cluster.members if one is not active))
    active.signal(signal.SIGCONT)
    await load.cluster.until(lambda: active.process is not process)
    await load.goes_on()


async def stop_standby(load: Load, chance: random.Random) -> None:
    await load.cluster.the_active()
    standby = chance.choice(load.cluster.standbys)
    standby.signal(signal.SIGSTOP)
    await load.goes_on(*(one for one in load.cluster.members if one is not standby))
    standby.signal(signal.SIGCONT)
    await load.goes_on()


async def stop_in_the_call(load: Load, chance: random.Random) -> None:
    """A server is stopped after its group was sent, and before that was written."""
    victim = chance.choice(load.cluster.members)
    connection = await connect(load.cluster.url, {})
    try:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(TAKE_LOCK)
        writing = asyncio.create_task(_written(load, victim))
        # Longer than they wait for the lock it is not kept, whoever has come by then.
        with suppress(TimeoutError):
            async with asyncio.timeout(3):
                while await connection.fetchval(WAITING) < len(load.cluster.members):
                    await asyncio.sleep(0.01)
        victim.signal(signal.SIGSTOP)
        await transaction.rollback()
    finally:
        await connection.close()
    await load.goes_on(*(one for one in load.cluster.members if one is not victim))
    victim.signal(signal.SIGCONT)
    await writing
    await load.goes_on()


async def _written(load: Load, member: Member) -> None:
    with suppress(NotDone):
        await load.write(member)


async def cut_database(load: Load, chance: random.Random) -> None:
    """One server is cut off from the database, its connections ended or silent; the others go on."""
    victim = chance.choice(load.cluster.members)
    chance.choice((victim.database.cut, victim.database.hold))()
    await load.goes_on(*(one for one in load.cluster.members if one is not victim))
    victim.heal()
    await load.goes_on()


async def silence_active(load: Load, _: random.Random) -> None:
    """Its connections to the database stay and say nothing: it ends by itself, and another one takes over."""
    active = await load.cluster.the_active()
    process = active.process
    active.database.hold()
    await load.goes_on(*(one for one in load.cluster.members if one is not active))
    await load.cluster.until(lambda: active.process is not process)
    active.heal()
    await load.goes_on()


async def cut_bus(load: Load, chance: random.Random) -> None:
    """All servers are cut off from NATS, which costs latency only."""
    for one in load.cluster.members:
        chance.choice((one.bus.cut, one.bus.hold))()
    await load.goes_on()
    load.cluster.heal()
    await load.goes_on()


async def cut_everything(load: Load, chance: random.Random) -> None:
    """One server loses the database, another one NATS, and the database is far away for the third."""
    first, second, third = chance.sample(load.cluster.members, 3)
    chance.choice((first.database.cut, first.database.hold))()
    chance.choice((second.bus.cut, second.bus.hold))()
    third.database.roughness.delay_seconds = 0.02
    await load.goes_on(second, third)
    third.database.roughness.delay_seconds = 0.0
    load.cluster.heal()
    await load.goes_on()


async def kill_database(load: Load, chance: random.Random) -> None:
    """It recovers from its log when it is back."""
    postgres = load.cluster.postgres
    await asyncio.to_thread(postgres.stop, signal.SIGQUIT)
    await asyncio.sleep(chance.choice((0.0, 2.0, 8.0)))
    await asyncio.to_thread(postgres.start)
    await load.goes_on()


async def restart_bus(load: Load, chance: random.Random) -> None:
    load.cluster.nats.stop()
    await load.goes_on()
    load.cluster.nats.start()
    await load.goes_on()


async def roll(load: Load, _: random.Random) -> None:
    """Every server is told to end and starts again, one after the other; the others serve meanwhile."""
    for one in load.cluster.members:
        before = one.process
        assert before is not None
        one.signal(signal.SIGTERM)
        await asyncio.to_thread(before.wait, DEADLINE_SECONDS)
        assert before.returncode == 0, one.told()
        await load.cluster.until(lambda one=one, before=before: one.process is not before)  # type: ignore[misc]
        await load.goes_on()


ALL: tuple[Failure, ...] = (
    kill_active,
    kill_standby,
    stop_active,
    stop_standby,
    stop_in_the_call,
    cut_database,
    silence_active,
    cut_bus,
    cut_everything,
    kill_database,
    restart_bus,
    roll,
)
