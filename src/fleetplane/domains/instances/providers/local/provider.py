"""Machines that are processes: each instance is an agent running on this computer.

Made for trying things out and for tests that need real agents. An instance is its process and
its directory (see `records`). The process is nobody's child, so it outlives this server; the next
one finds it by the directory and goes on (see `processes`). A process that has ended is a machine
that is gone: it is never started a second time.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from fleetplane.domains.instances.providers.contract import (
    BalancerTargetState,
    Created,
    CreateRequest,
    Description,
    InstanceGone,
    LoadBalancer,
    ObservedMachine,
    ProviderCapability,
    ProviderContext,
    ProviderError,
    ProviderPage,
    ProviderStatus,
    QuotaExhausted,
    ids_after,
)
from fleetplane.domains.instances.providers.local import processes
from fleetplane.domains.instances.providers.local.records import LocalInstanceRecord, LocalRecords, Stage
from fleetplane.domains.instances.providers.options import ProviderOptions, parse
from fleetplane.domains.instances.providers.without_extras import WithoutExtras
from fleetplane.kernel.errors import InvalidArgument, SettingsError

VERSION = "1"
AGENT_COMMAND = ("-m", "fleetplane.cli.main", "agent", "instance")
THREADS = 8
"""Creations and deletions at a time. A deletion may wait for its grace; the others go on."""

LOCKS = 64
"""One lock guards the instances whose ids fall on it: nobody creates and deletes the same one at once."""

INHERITED = ("HOME", "LANG", "LC_ALL", "PATH", "PYTHONPATH", "TMPDIR", "TZ")
"""Of the server's environment. All else stays here: it holds the server's own secrets."""

T = TypeVar("T")


OWN_VARIABLE = re.compile(r"NSTANCE_[A-Z0-9_]+")
"""Variables that a document may set. Others, such as PATH, LD_PRELOAD or PYTHONPATH, choose what code runs
as the server's user, which is for the server's own settings to say."""


class LocalOptions(ProviderOptions, frozen=True):
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    report_interval_seconds: float = 1.0
    spot_poll_interval_seconds: float = 2.0
    stop_grace_seconds: float = 5.0
    stop_on_close: bool = False
    max_instances: int = 256
    log_limit_bytes: int = 8 << 20


class LocalProvider(WithoutExtras):
    kind = "local"

    def __init__(self, context: ProviderContext) -> None:
        self._context = context
        self._options = LocalOptions()
        self._records = LocalRecords(context.state_directory / "local")
        self._known: dict[str, LocalInstanceRecord] = {}
        self._locks = tuple(threading.Lock() for _ in range(LOCKS))
        self._threads: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"<LocalProvider {self._records.root} instances={len(self._known)}>"

    def describe(self) -> Description:
        return Description(
            name=self.kind,
            version=VERSION,
            summary="real agents as processes of this computer",
            options={
                "environment": "variables for every agent, of those that the server's settings allow",
                "report_interval_seconds": "between health reports, unless the request says otherwise",
                "spot_poll_interval_seconds": "between looks for a termination notice",
                "stop_grace_seconds": "from asking an agent to end to killing it",
                "stop_on_close": "end all agents with the server; otherwise the next server finds them",
                "max_instances": "how many there may be",
                "log_limit_bytes": "size at which an agent's log is rolled over",
            },
            args={"environment": "variables for this template's agents"},
            capabilities=frozenset({ProviderCapability.LOAD_BALANCERS}),
            durable=not self._options.stop_on_close,
            prompt=True,
        )

    def configure(self, options: Mapping[str, object]) -> None:
        if "command" in options:
            raise SettingsError(
                "a document cannot name programs",
                field="options.command",
                hint="set instances.agent_command in the server's settings",
            )
        self._options = parse(self.kind, options, LocalOptions)

    def _variable_problem(self, name: str) -> str | None:
        if OWN_VARIABLE.fullmatch(name) or name in self._context.variables:
            return None
        return (
            f"a document cannot set the environment variable {name[:64]!r}: it may set NSTANCE_… and those "
            "that the server's setting instances.agent_variables names"
        )

    def validate(self) -> list[str]:
        problems = [
            f"options.environment: {problem}"
            for name in self._options.environment
            if (problem := self._variable_problem(name))
        ]
        if not processes.PROC.joinpath("self/stat").exists():
            problems.append("it needs Linux's /proc")
        program = self._command[0]
        if shutil.which(program, path=self._context.environment.get("PATH", os.defpath)) is None:
            problems.append(f"instances.agent_command: there is no program {program!r}")
        return problems

    @property
    def _command(self) -> tuple[str, ...]:
        return self._context.command or (sys.executable, *AGENT_COMMAND)

    async def start(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="local-provider")
        await self._run(self._take_over)

    async def close(self, *, kill: bool | None = None) -> None:
        """Leave the agents running, or end them: as the options say, or as `kill` does."""
        if self._threads is None:
            return
        if self._options.stop_on_close if kill is None else kill:
            async with asyncio.TaskGroup() as ending:
                for instance_id in tuple(self._known):
                    ending.create_task(self._run(lambda each=instance_id: self._end(each)))  # type: ignore[misc]
        threads, self._threads = self._threads, None
        await asyncio.to_thread(threads.shutdown)

    async def create_instance(self, request: CreateRequest) -> Created:
        environment = self._environment(request)  # refuses what cannot be, before anything is written
        return await self._run(lambda: self._create(request, environment).as_created())

    async def delete_instance(self, instance_id: str, provider_id: str) -> None:
        self._find(instance_id, provider_id)
        await self._run(lambda: self._end(instance_id))

    async def get_instance_status(self, instance_id: str, provider_id: str) -> ObservedMachine:
        record = self._find(instance_id, provider_id)
        return await self._run(lambda: self._observe(record))

    async def list_instances(
        self, cluster: str, shard: str, *, limit: int, next_token: str = ""
    ) -> ProviderPage:
        owned = sorted(
            record.instance_id
            for record in tuple(self._known.values())
            if (record.cluster, record.shard) == (cluster, shard)
        )
        ids, token = ids_after(owned, next_token, limit)
        records = [record for each in ids if (record := self._known.get(each)) is not None]
        items = await self._run(lambda: tuple(self._observe(record) for record in records))
        return ProviderPage(items=items, next_token=token)

    async def check_subnet_capacity(self, subnet: str) -> bool:  # noqa: ARG002  # there is but one computer
        return len(self._known) < self._options.max_instances

    # No traffic is balanced between local processes; a group that wants it is told that all is well.

    async def register_with_lb(
        self,
        provider_id: str,
        balancer: LoadBalancer,
        *,
        zone: str = "",
        wake_proxy: bool = False,
    ) -> None:
        pass

    async def deregister_from_lb(
        self,
        provider_id: str,
        balancer: LoadBalancer,
        *,
        zone: str = "",
        wake_proxy: bool = False,
    ) -> None:
        pass

    async def get_lb_target_state(
        self,
        provider_id: str,  # noqa: ARG002
        balancer: LoadBalancer,  # noqa: ARG002
        *,
        zone: str = "",  # noqa: ARG002
        wake_proxy: bool = False,  # noqa: ARG002
    ) -> BalancerTargetState:
        return BalancerTargetState.HEALTHY

    async def list_lb_instances(
        self,
        balancer: LoadBalancer,  # noqa: ARG002
        *,
        zone: str = "",  # noqa: ARG002
    ) -> tuple[str, ...]:
        return tuple(sorted(map(provider_id_of, self._known)))

    # Below, everything blocks and runs in our threads.

    async def _run(self, work: Callable[[], T]) -> T:
        # Never cut short: a caller that gives up leaves the work to finish under its lock, so
        # that its retry waits for it and finds what it made.
        if self._threads is None:
            raise ProviderError("the local provider is not running")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _lock(self, instance_id: str) -> threading.Lock:
        return self._locks[hash(instance_id) % LOCKS]

    def _take_over(self) -> None:
        """Put in order what an earlier server left: go on with what runs, finish what was half done."""
        self._records.open()
        for record in tuple(self._records.all()):
            directory = self._records.directory(record.instance_id)
            process = processes.noted(directory)
            match record.stage:
                case Stage.CREATED:
                    self._known[record.instance_id] = record
                case Stage.CREATING if process is not None and processes.is_alive(process, directory):
                    self._settle(record)
                case Stage.CREATING | Stage.DELETING:
                    # Nobody was told of a half-made one: a retry makes it anew; if none comes, none leaks.
                    self._clear(record.instance_id)

    def _create(self, request: CreateRequest, environment: Mapping[str, str]) -> ObservedMachine:
        instance_id = request.instance_id
        directory = self._records.directory(instance_id)
        with self._lock(instance_id):
            record = self._known.get(instance_id)
            if record is not None:
                return self._observe(record)
            if len(self._known) >= self._options.max_instances:
                raise QuotaExhausted(f"{self._options.max_instances} local instances are all there may be")
            record = LocalInstanceRecord(
                instance_id=instance_id,
                stage=Stage.CREATING,
                cluster=request.cluster,
                shard=request.shard,
                instance_type=request.instance_type,
                tags=request.all_tags(),
                launched_at_ns=self._context.clock.now_ns(),
            )
            self._records.write(record)
            try:
                self._records.furnish(request)
                processes.start(directory, self._command, environment)
            except BaseException:
                self._clear(instance_id)
                raise
            return self._observe(self._settle(record))

    def _settle(self, record: LocalInstanceRecord) -> LocalInstanceRecord:
        record = msgspec.structs.replace(record, stage=Stage.CREATED)
        self._records.write(record)
        self._known[record.instance_id] = record
        return record

    def _end(self, instance_id: str) -> None:
        with self._lock(instance_id):
            record = self._known.get(instance_id)
            if record is None:
                raise InstanceGone(f"there is no local instance {instance_id!r}")
            # Noted first: a successor must finish this, and a second caller sees that it is going.
            record = msgspec.structs.replace(record, stage=Stage.DELETING)
            self._records.write(record)
            self._known[instance_id] = record
            self._clear(instance_id)
            del self._known[instance_id]

    def _clear(self, instance_id: str) -> None:
        """End whatever runs in the instance's directory, then remove it."""
        directory = self._records.directory(instance_id)
        processes.end(directory, processes.noted(directory), grace_seconds=self._options.stop_grace_seconds)
        self._records.remove(instance_id)

    def _find(self, instance_id: str, provider_id: str) -> LocalInstanceRecord:
        record = self._known.get(instance_id)
        if record is None or provider_id not in ("", provider_id_of(instance_id)):
            raise InstanceGone(f"there is no local instance {instance_id!r}")
        return record

    def _observe(self, record: LocalInstanceRecord) -> ObservedMachine:
        directory = self._records.directory(record.instance_id)
        process = processes.noted(directory)
        alive = process is not None and processes.is_alive(process, directory)
        if record.stage is Stage.DELETING:
            status = ProviderStatus.DELETING
        else:
            status = ProviderStatus.RUNNING if alive else ProviderStatus.DELETED
        self._records.roll_log(record.instance_id, self._options.log_limit_bytes)
        return ObservedMachine(
            instance_id=record.instance_id,
            provider_id=provider_id_of(record.instance_id),
            status=status,
            private_ipv4="127.0.0.1",
            hostname=record.instance_id,
            launched_at_ns=record.launched_at_ns,
            instance_type=record.instance_type,
            region=self._context.region or "local",
            zone=self._context.zone or socket.gethostname(),
            cluster=record.cluster,
            shard=record.shard,
            tags=record.tags,
        )

    def _environment(self, request: CreateRequest) -> dict[str, str]:
        directory = self._records.directory(request.instance_id)
        inherited = {name: value for name, value in self._context.environment.items() if name in INHERITED}
        interval = request.report_interval_seconds or self._options.report_interval_seconds
        return {
            **inherited,
            **self._options.environment,
            **self._template_environment(request.args),
            "NSTANCE_SERVER_REGISTRATION_ADDR": request.registration_address,
            "NSTANCE_SERVER_AGENT_ADDR": request.agent_address,
            "NSTANCE_INSTANCE_ID": request.instance_id,
            "NSTANCE_INSTANCE_KIND": request.prefix,
            "NSTANCE_IDENTITY_DIR": str(directory / "identity"),
            "NSTANCE_KEYS_DIR": str(directory / "keys"),
            "NSTANCE_RECV_DIR": str(directory / "recv"),
            "NSTANCE_REPORT_INTERVAL": f"{interval:g}s",
            "NSTANCE_SPOT_POLL_INTERVAL": f"{self._options.spot_poll_interval_seconds:g}s",
            "NSTANCE_INSTANCE_HOSTNAME": request.instance_id,
            "NSTANCE_INSTANCE_IPV4": "127.0.0.1",
        }

    def _template_environment(self, args: Mapping[str, object]) -> dict[str, str]:
        for name in args:
            if name != "environment":
                raise InvalidArgument(
                    f"local instances take no argument {name!r}; known is environment", field=f"args.{name}"
                )
        try:
            wanted = msgspec.convert(args.get("environment", {}), dict[str, str])
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"args.environment: {error}", field="args.environment") from None
        for name in wanted:
            if problem := self._variable_problem(name):
                raise InvalidArgument(f"args.environment: {problem}", field=f"args.environment.{name}")
        return wanted


def provider_id_of(instance_id: str) -> str:
    return f"local-{instance_id}"
