"""The rules for what instances are given: files, certificates, user data and the templates in them.

A file that an agent would refuse is refused here. On the agent's side one bad file holds back every other,
again and again, and nobody is told.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Collection, Mapping

from fleetplane.domains.instances.configuration.decode import nearest
from fleetplane.domains.instances.configuration.jsonc import Path
from fleetplane.domains.instances.configuration.problems import ProblemReport
from fleetplane.domains.instances.configuration.schema import FileSection, InstancesDocument, Userdata
from fleetplane.domains.instances.configuration.templates import template as templates
from fleetplane.domains.instances.configuration.templates.template import (
    Fields,
    TemplateData,
    TemplateInvalid,
)
from fleetplane.domains.instances.rules import workload
from fleetplane.domains.instances.rules.files import CONTENT_RULES, LAST_WRITTEN

EXTENSION_OF_KIND = {"certificate": ".crt", "env": ".env", "json": ".json"}
MAX_CERTIFICATE_TTL_HOURS = 24 * 365 * 100

_ENV_KEY = re.compile(r"[A-Z0-9_]+")
_KIND = re.compile(r"[a-z]{3}")


def check_templates(config: InstancesDocument, report: ProblemReport) -> None:
    for name, template in config.templates.items():
        path: Path = ("templates", name)
        if template.kind and not _KIND.fullmatch(template.kind):
            report.add((*path, "kind"), "must be three lower-case letters: ids of instances begin with it")
        if template.size < 0:
            report.add((*path, "size"), "must not be negative")
        for file_name, file in template.files.items():
            _check_file_name(report, (*path, "files", file_name), file_name, file)
            _check_file(report, (*path, "files", file_name), file, config.certificates)
        check_texts(report, (*path, "args"), template.args)
        _check_userdata(report, (*path, "userdata"), template.userdata)


def check_defaults(config: InstancesDocument, report: ProblemReport) -> None:
    check_texts(report, ("defaults", "args"), config.defaults.args)
    _check_userdata(report, ("defaults", "userdata"), config.defaults.userdata)


def check_server_files(config: InstancesDocument, report: ProblemReport) -> None:
    for name, file in config.server.files.items():
        path: Path = ("server", "files", name)
        problem = base_name_problem(name)
        if problem is not None:
            report.add(path, f"{name!r} {problem}", at_key=True)
        if file.kind == "certificate":
            report.add((*path, "kind"), "the server has no agent to make a key for a certificate")
        else:
            _check_file(report, path, file, config.certificates)


def check_certificates(config: InstancesDocument, report: ProblemReport) -> None:
    for name, certificate in config.certificates.items():
        path: Path = ("certificates", name)
        if not 0 < certificate.ttl_hours <= MAX_CERTIFICATE_TTL_HOURS:
            report.add((*path, "ttl"), f"must be hours from 1 to {MAX_CERTIFICATE_TTL_HOURS}")
        if certificate.cn is not None:
            check_text(report, (*path, "cn"), certificate.cn)
        for part in ("organization", "dns", "ip", "uri", "country", "province", "locality", "street"):
            for index, text in enumerate(getattr(certificate, part)):
                check_text(report, (*path, part, index), text)
                if problem := _name_problem(part, text):
                    report.add((*path, part, index), problem)
        if certificate.cn is not None and workload.names_server(certificate.cn, (workload.SERVER_NAME,)):
            report.add((*path, "cn"), f"{certificate.cn!r} is the server's own name")


def _name_problem(part: str, text: str) -> str | None:
    """What is wrong with a name that is written out. One made by a template is checked when it is issued,
    but how a URI begins must always be written out."""
    if part == "uri":
        return workload.uri_problem(text.partition("{{")[0] if "{{" in text else text)
    if "{{" in text or part not in ("dns", "ip"):
        return None
    if workload.names_server(text, (workload.SERVER_NAME,)):
        return f"{text!r} is the server's own name"
    return workload.dns_problem(text) if part == "dns" else None


def base_name_problem(name: str) -> str | None:
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        return "must be a plain file name, without a folder"
    return None


def _check_file_name(report: ProblemReport, path: Path, name: str, file: FileSection) -> None:
    problem = base_name_problem(name)
    stem, dot, ending = name.rpartition(".")
    extension = dot + ending
    wanted = EXTENSION_OF_KIND.get(file.kind)
    if problem is None and name.startswith("."):
        problem = "must not begin with a dot"
    elif problem is None and name == LAST_WRITTEN:
        problem = "is the agent's own"
    elif problem is None and (extension not in CONTENT_RULES or not stem):
        problem = f"would be refused by agents: they accept only {', '.join(CONTENT_RULES)}"
    elif problem is None and wanted is not None and extension != wanted:
        problem = (
            f"is of kind {file.kind} and must end in {wanted}: agents check {extension} files to be "
            f"{CONTENT_RULES[extension].words}"
        )
    if problem is not None:
        report.add(path, f"{name!r} {problem}", at_key=True)


def _check_file(report: ProblemReport, path: Path, file: FileSection, certificates: Collection[str]) -> None:
    _check_needs(report, path, file)
    template = (*path, "template")
    match file.kind, file.template:
        case "secret", _:
            pass  # the source is the name of a secret, as it stands
        case "storage", _:
            check_text(report, (*path, "source"), file.source)
        case "certificate", str() as name:
            if name not in certificates:
                report.add(template, f"there is no certificate {name!r}; {nearest(name, certificates)}")
        case "certificate", None:
            pass
        case "certificate", _:
            report.add(template, "must be the name of a certificate")
        case "env", Mapping() as lines:
            _check_env(report, template, lines)
        case "json", Mapping() as content:
            check_texts(report, template, content)
        case (("env" | "json"), other) if other is not None:
            report.add(template, f"must be an object for kind {file.kind}")
        case "string", str() as text:
            check_text(report, template, text)
        case "string", other if other is not None:
            report.add(template, "must be a string for kind string")


def _check_needs(report: ProblemReport, path: Path, file: FileSection) -> None:
    """Which of source, template and key a kind must have, and which it cannot use."""
    needs = {"secret": ("source",), "storage": ("source",), "certificate": ("template", "key")}
    wanted = needs.get(file.kind, ("template",)) if file.kind else ()
    present = {
        "source": bool(file.source),
        "template": file.template is not None,
        "key": file.key is not None,
    }
    for name, is_present in present.items():
        if name in wanted and not is_present:
            report.add((*path, name), f"{name!r} is required for kind {file.kind}")
        if wanted and name not in wanted and is_present:
            report.add((*path, name), f"has no meaning for kind {file.kind}", at_key=True)
    if file.key is not None and file.key.name:
        problem = base_name_problem(file.key.name)
        if problem is None and file.key.name.startswith("."):
            problem = "must not begin with a dot"
        if problem is not None:
            report.add((*path, "key", "name"), f"{file.key.name!r} {problem}")


def _check_env(report: ProblemReport, path: Path, lines: Mapping[str, object]) -> None:
    for key, value in lines.items():
        if not _ENV_KEY.fullmatch(key):
            report.add((*path, key), f"{key!r} may hold only A to Z, 0 to 9 and _", at_key=True)
        if isinstance(value, str):
            check_text(report, (*path, key), value)
        else:
            report.add((*path, key), "must be a string: environment variables are")


def _check_userdata(report: ProblemReport, path: Path, userdata: Userdata | None) -> None:
    if userdata is None:
        return
    if userdata.coding == "gzip" and not userdata.is_url:
        message = "gzip cannot be written inside JSON: use base64+gzip, or source url"
        report.add((*path, "encoding"), message)
    if userdata.is_url:
        if not re.match(r"https://[^/\s]+|storage:[^/\s]+", userdata.content):
            message = "must be an https URL, or storage: and the name of an object, when source is url"
            report.add((*path, "content"), message)
        check_text(report, (*path, "content"), userdata.content)
    elif userdata.coding == "plain":
        check_text(report, (*path, "content"), userdata.content, nonce=True)
    elif userdata.coding.startswith("base64"):
        try:
            base64.b64decode("".join(userdata.content.split()), validate=True)
        except (binascii.Error, ValueError):
            report.add((*path, "content"), f"is not base64, which encoding {userdata.coding!r} promises")


def check_texts(report: ProblemReport, path: Path, value: object) -> None:
    """Every string in a JSON value is a template."""
    match value:
        case str():
            check_text(report, path, value)
        case Mapping():
            for key, item in value.items():
                check_texts(report, (*path, key), item)
        case list() | tuple():
            for index, item in enumerate(value):
                check_texts(report, (*path, index), item)


def check_text(report: ProblemReport, path: Path, text: str, *, nonce: bool = False) -> None:
    """The text must be a template, and what it names must exist."""
    if "{{" not in text:
        return
    try:
        template = templates.compile(text)
    except TemplateInvalid as error:
        report.add(path, _in_line(f"template: {error.complaint}", text, error.line))
        return
    known = TemplateData(instance_id="", instance_kind="", nonce="" if nonce else None).mapping()
    for reference in template.references:
        complaint = _unknown_field(reference.names, known)
        if complaint is not None:
            report.add(path, _in_line(f"template: {complaint}", text, reference.line))
            return


def _in_line(message: str, text: str, line: int) -> str:
    return f"{message} (line {line} of the text)" if "\n" in text else message


def _unknown_field(names: tuple[str, ...], known: Fields) -> str | None:
    """What a reference asks for that no instance will have."""
    seen = ""
    value: object = known
    for name in names:
        match value:
            case Fields():
                if name == "Nonce" and name not in value:
                    return "only user data has .Nonce"
                if name not in value:
                    return f"{seen or 'the data'} has no .{name}; {nearest(name, value)}"
                value = value[name]
            case Mapping():
                value = ""
            case _:
                return f"{seen} is text and has no .{name}"
        seen += f".{name}"
    return None
