"""The configuration of a shard: a document people write, everything it says, and whether it can be used.

Pure but for the questions which providers are installed and what options they take: text in, values or
problems out. Where the text is kept, and what is done with it, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fleetplane.domains.instances.configuration import decode, idle_keys, jsonc, older, validate
from fleetplane.domains.instances.configuration.problems import (
    ConfigurationInvalid,
    DocumentProblem,
    ProblemReport,
)
from fleetplane.domains.instances.configuration.schema import InstancesDocument
from fleetplane.domains.instances.providers import registry

__all__ = ["Checked", "ConfigurationInvalid", "DocumentProblem", "InstancesDocument", "check", "parse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A document that can be used."""

    configuration: InstancesDocument
    warnings: tuple[DocumentProblem, ...]
    """What in it has no effect here."""


def parse(text: bytes | str, *, name: str, providers: Collection[str] | None = None) -> InstancesDocument:
    """As `check`, the configuration alone."""
    return check(text, name=name, providers=providers).configuration


def check(text: bytes | str, *, name: str, providers: Collection[str] | None = None) -> Checked:
    """Read and check a document. `name` is what it is called in messages, such as its file's name.

    It may name any of `providers`: those that are installed, unless told otherwise.
    Raises ConfigurationInvalid with everything that is wrong with it.
    """
    try:
        document = jsonc.parse(text if isinstance(text, str) else text.decode())
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        column = error.start - error.object.rfind(b"\n", 0, error.start)
        problem = DocumentProblem(
            path="", line=line, column=column, message="the text is not UTF-8 from here on"
        )
        raise ConfigurationInvalid(name, [problem]) from None
    except jsonc.SyntaxInvalid as error:
        place = error.position
        problem = DocumentProblem(path="", line=place.line, column=place.column, message=error.message)
        raise ConfigurationInvalid(name, [problem]) from None
    report = ProblemReport(document=document)
    config = _checked(document, report, registry.names() if providers is None else providers)
    if report.problems or config is None:
        raise ConfigurationInvalid(name, report.in_order())
    return Checked(configuration=validate.resolve(config), warnings=idle_keys.warnings(document, config))


def _checked(
    document: jsonc.JsoncDocument, report: ProblemReport, providers: Collection[str]
) -> InstancesDocument | None:
    for path, offset in document.duplicates:
        where = document.locate(offset)
        report.add_at(path, where, f"{path[-1]!r} is given twice in the same object")
    if older.recognise(document.value, report):
        return None
    older.note_renamed(document.value, report)
    config = decode.decode(InstancesDocument, document.value, report)
    validate.check_provider(config, report, providers)
    _check_options(config, report)
    validate.validate(config, report)
    return config


def _check_options(config: InstancesDocument, report: ProblemReport) -> None:
    """Check the options of a provider that is installed here; those of others are unknown."""
    infra = config.shard.infra
    refused = (
        registry.options_refused(infra.provider, infra.options)
        if infra.provider in registry.names()
        else None
    )
    if refused is not None:
        keys = (refused.field or "").split(".")[1:]
        report.add(("shard", "infra", "options", *keys), refused.message, at_key=bool(keys))
