"""Rendering: a compiled template and the data for it, to text. Nothing is evaluated but the template.

Keys that a map lacks render as nothing, fields that the data can never have are errors. Output and loops are
bounded, so that a template is no way to hold up a server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fleetplane.domains.instances.configuration.templates import syntax
from fleetplane.domains.instances.configuration.templates.functions import (
    FUNCTIONS,
    MAX_OUTPUT_CHARACTERS,
    Fields,
    FunctionRefusal,
    TemplateInvalid,
    Value,
    display,
    kind,
    truth,
)
from fleetplane.domains.instances.configuration.templates.syntax import BlockKind, Pipeline, Reference
from fleetplane.domains.instances.configuration.templates.tokens import Text

MAX_ITERATIONS = 10_000  # over all loops of one rendering

__all__ = ["Fields", "Template", "TemplateData", "TemplateInvalid", "compile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    nodes: tuple[syntax.Node, ...]
    references: tuple[Reference, ...]
    """Every field of the data that is named, for checking a template before there is data."""

    def render(self, data: Mapping[str, object]) -> str:
        rendering = _Rendering(data=data)
        rendering.nodes(self.nodes, data)
        return "".join(rendering.output)


def compile(text: str) -> Template:  # noqa: A001 -- as in re.compile
    """Read a template, or raise TemplateInvalid with its line."""
    tree = syntax.parse(text)
    return Template(nodes=tree.nodes, references=tree.references)


@dataclass(slots=True, kw_only=True)
class _Rendering:
    data: Mapping[str, object]
    output: list[str] = field(default_factory=list)
    written: int = 0
    iterations: int = 0
    variables: list[tuple[str, Value]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.variables.append(("", self.data))

    def nodes(self, nodes: Iterable[syntax.Node], dot: Value) -> None:
        for node in nodes:
            match node:
                case Text(text):
                    self.write(text, line=0)
                case syntax.TemplateAction(pipeline):
                    value = self.pipeline(pipeline, dot)
                    if not pipeline.variables:
                        self.write(self.shown(value, pipeline.line), line=pipeline.line)
                case syntax.TemplateBlock():
                    outer = len(self.variables)
                    self.block(node, dot)
                    del self.variables[outer:]

    def write(self, text: str, *, line: int) -> None:
        self.written += len(text)
        if self.written > MAX_OUTPUT_CHARACTERS:
            raise TemplateInvalid(f"renders more than {MAX_OUTPUT_CHARACTERS} characters", line=line or 1)
        self.output.append(text)

    def shown(self, value: Value, line: int) -> str:
        try:
            return display(value)
        except FunctionRefusal as refusal:
            raise TemplateInvalid(str(refusal), line=line) from None

    def block(self, block: syntax.TemplateBlock, dot: Value) -> None:
        value = self.pipeline(block.pipeline, dot)
        if block.kind is BlockKind.RANGE:
            self.loop(block, value, dot)
        elif not truth(value):
            self.nodes(block.otherwise, dot)
        else:
            self.nodes(block.body, value if block.kind is BlockKind.WITH else dot)

    def loop(self, block: syntax.TemplateBlock, value: Value, dot: Value) -> None:
        line, names = block.pipeline.line, block.pipeline.variables
        items = _items(value, line)
        for key, item in items:
            self.iterations += 1
            if self.iterations > MAX_ITERATIONS:
                raise TemplateInvalid(f"loops more than {MAX_ITERATIONS} times", line=line)
            before = len(self.variables)
            self.variables += zip(names, (key, item) if len(names) == 2 else (item,), strict=False)
            self.nodes(block.body, item)
            del self.variables[before:]
        if not items:
            self.nodes(block.otherwise, dot)

    def pipeline(self, pipeline: Pipeline, dot: Value) -> Value:
        value = self.command(pipeline.commands[0], dot, (), pipeline.line)
        for command in pipeline.commands[1:]:
            value = self.command(command, dot, (value,), pipeline.line)
        for name in pipeline.variables:
            self.assign(name, value, declares=pipeline.declares)
        return value

    def assign(self, name: str, value: Value, *, declares: bool) -> None:
        if declares:
            self.variables.append((name, value))
            return
        latest = max(at for at, (known, _) in enumerate(self.variables) if known == name)
        self.variables[latest] = (name, value)

    def command(self, command: syntax.Command, dot: Value, piped: tuple[Value, ...], line: int) -> Value:
        first, *operands = command
        if not isinstance(first, syntax.Function):
            return self.operand(first, dot, line)
        if first.name in ("and", "or"):
            return self.short_circuit(first.name, operands, dot, piped, line)
        arguments = [*(self.operand(operand, dot, line) for operand in operands), *piped]
        try:
            value = FUNCTIONS[first.name](arguments)
        except FunctionRefusal as refusal:
            raise TemplateInvalid(str(refusal), line=line) from None
        # Strings grow by doubling: bound each, not only what is written in the end.
        if isinstance(value, str) and len(value) > MAX_OUTPUT_CHARACTERS:
            raise TemplateInvalid(
                f"{first.name} makes more than {MAX_OUTPUT_CHARACTERS} characters", line=line
            )
        return value

    def short_circuit(
        self, name: str, operands: list[syntax.Operand], dot: Value, piped: tuple[Value, ...], line: int
    ) -> Value:
        """`and` gives its first false argument, `or` its first true one, else both their last."""
        value: Value = None
        for operand in operands:
            value = self.operand(operand, dot, line)
            if truth(value) is (name == "or"):
                return value
        if not operands and not piped:
            raise TemplateInvalid(f"{name} wants an argument", line=line)
        return piped[0] if piped else value

    def operand(self, operand: syntax.Operand, dot: Value, line: int) -> Value:
        match operand:
            case syntax.Constant(value):
                return value
            case syntax.Field(names):
                return _look_up(dot, names, line)
            case syntax.Variable(name, names):
                value = next(value for known, value in reversed(self.variables) if known == name)
                return _look_up(value, names, line)
            case syntax.Nested(pipeline, names):
                return _look_up(self.pipeline(pipeline, dot), names, line)
            case syntax.Function():
                return self.command((operand,), dot, (), line)


def _look_up(value: Value, names: tuple[str, ...], line: int) -> Value:
    for name in names:
        match value:
            case Fields() if name not in value:
                raise TemplateInvalid(f"there is no .{name} here; known: {', '.join(value)}", line=line)
            case Mapping():
                value = value.get(name, "")
            case _:
                raise TemplateInvalid(f"{kind(value)} has no .{name}", line=line)
    return value


def _items(value: Value, line: int) -> list[tuple[Value, Value]]:
    match value:
        case Mapping() if not isinstance(value, Fields):
            return [(key, value[key]) for key in sorted(value)]
        case list() | tuple():
            return list(enumerate(value))
        case None:
            return []
        case _:
            raise TemplateInvalid(f"range cannot go over {kind(value)}", line=line)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateData:
    """What templates can say about the instance they are rendered for."""

    instance_id: str
    instance_kind: str
    arch: str = ""
    instance_type: str = ""
    hostname: str = ""
    fqdn: str = ""
    ip4: str = ""
    ip6: str = ""
    report_interval: str = ""
    """How often its agent should report, as agents read it."""
    cluster_id: str = ""
    ca_cert: str = ""
    """PEM."""
    workload_ca_cert: str = ""
    """PEM, of the authorities that sign certificate files; empty in user data."""
    shard: str = ""
    registration_addr: str = ""
    agent_addr: str = ""
    operator_addr: str = ""
    provider_kind: str = ""
    region: str = ""
    zone: str = ""
    vars: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, str] = field(default_factory=dict)
    """Image ids by the name they have in the configuration."""
    nonce: str | None = None
    """The registration nonce; only user data has it."""

    def mapping(self) -> Fields:
        data = Fields(
            Instance=Fields(
                ID=self.instance_id,
                Kind=self.instance_kind,
                Arch=self.arch,
                Type=self.instance_type,
                Hostname=self.hostname,
                FQDN=self.fqdn,
                IP4=self.ip4,
                IP6=self.ip6,
                ReportInterval=self.report_interval,
            ),
            Cluster=Fields(ID=self.cluster_id, CACert=self.ca_cert, WorkloadCACert=self.workload_ca_cert),
            Server=Fields(
                Shard=self.shard,
                RegistrationAddr=self.registration_addr,
                AgentAddr=self.agent_addr,
                OperatorAddr=self.operator_addr,
            ),
            Provider=Fields(Kind=self.provider_kind, Region=self.region, Zone=self.zone),
            Vars=dict(self.vars),
            Image=self.images,
        )
        if self.nonce is not None:
            data["Nonce"] = self.nonce
        return data
