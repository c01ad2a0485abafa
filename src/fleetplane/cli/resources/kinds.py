"""Which resource a word means: its plural, its name, a short name; with a hint for what is nearly one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fleetplane.client.places import Place
from fleetplane.kernel.errors import IntegrityError, InvalidArgument, NotFound

if TYPE_CHECKING:
    from fleetplane.client.sync import Fleet, Resources

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
SAID = ("context", "data_dir", "server", "token_file", "ca")
COMPLETE_SECONDS = 3.0
"""A shell that completes does not wait longer than this."""


def scope_options(command: F) -> F:
    """At and below which scope; the context's when nothing is said."""
    for option in (
        click.option("-A", "--all-scopes", is_flag=True, help="Everywhere, whatever the context says."),
        click.option("--tenant", default="", metavar="NAME", help="The scope of a tenant."),
        click.option("--scope", default="", help="At and below which scope, such as /tenants/acme."),
    ):
        command = option(command)
    return command


def scope_of(fleet: Fleet, scope: str, tenant: str, all_scopes: bool = False) -> str:
    """The scope that was asked for; empty for everywhere."""
    if sum((bool(scope), bool(tenant), all_scopes)) > 1:
        raise InvalidArgument("--scope, --tenant and --all-scopes say the same; give one")
    if all_scopes:
        return ""
    if tenant:
        return f"/tenants/{tenant}"
    if scope and not scope.startswith("/"):
        raise InvalidArgument(f"{scope!r} is no scope", field="scope", hint="such as /tenants/acme")
    return scope or fleet.endpoint.scope


class Kinds:
    """The resources of a server. Discovery is asked only where a word is not a plural."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: Sequence[Mapping[str, Any]] | None = None

    def all(self) -> Sequence[Mapping[str, Any]]:
        """Every resource, as discovery tells it."""
        if self._known is None:
            found = self._fleet.discover().get("resources")
            if not isinstance(found, list) or not all(
                isinstance(one, dict) and "plural" in one for one in found
            ):
                raise IntegrityError("the server's answer is no discovery")
            self._known = found
        return self._known

    def named(self, word: str) -> Mapping[str, Any]:
        """The resource that a word means; raises `NotFound` with the nearest."""
        for one in self.all():
            if word.lower() in words_of(one):
                return one
        import difflib

        every = sorted({word for one in self.all() for word in words_of(one) if len(word) > 2})
        nearest = difflib.get_close_matches(word.lower(), every, n=3)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "`fleetplane kinds` lists them"
        raise NotFound(f"there is no kind {word!r}", hint=hint)

    def using(self, word: str, call: Callable[[Resources], T]) -> T:
        """Do something with the resource that a word means: at once if it is a plural, else after a look."""
        if word.isascii() and word.islower() and word.replace("-", "").isalnum() and word.endswith("s"):
            try:
                return call(self._fleet.resource(word))
            except NotFound:
                if self.named(word)["plural"] == word:
                    raise
        return call(self._fleet.resource(str(self.named(word)["plural"])))


def words_of(resource: Mapping[str, Any]) -> list[str]:
    """Every word that means a resource."""
    return [str(resource["plural"]), str(resource.get("name", "")), *map(str, resource.get("shortNames", ()))]


def targets(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Kinds and names, from `gpus`, `gpus,edge-nodes`, `gpu/a gpu/b` or `gpus a b`; the name may be empty."""
    first, *rest = words
    if "/" in first:
        for word in words:
            kind, slash, name = word.partition("/")
            if not kind or not slash or not name:
                raise click.UsageError(f"{word!r} is not KIND/NAME.")
            yield kind, name
        return
    kinds = [kind for kind in first.split(",") if kind]
    if not kinds or (rest and len(kinds) > 1):
        raise click.UsageError("names follow one kind: KIND NAME…, or KIND/NAME….")
    for kind in kinds:
        if rest:
            yield from ((kind, name) for name in rest)
        else:
            yield kind, ""


def named_target(words: Sequence[str]) -> tuple[str, str]:
    """Exactly one kind and name."""
    found = list(targets(words))
    if len(found) != 1 or not found[0][1]:
        raise click.UsageError("name one object: KIND/NAME, or KIND NAME.")
    return found[0]


def complete_targets(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Kinds and names, for the shell."""
    from fleetplane.client.requests import Query
    from fleetplane.client.sync import connect

    values = context.params
    said = {
        name: values[name]
        for name in ("context", "data_dir", "server", "token_file", "ca")
        if values.get(name)
    }
    given = values.get(parameter.name or "") or ()
    before = [given] if isinstance(given, str) else list(given)
    with connect(Place(**said, timeout=COMPLETE_SECONDS)) as fleet:
        kinds = Kinds(fleet)
        kind, slash, _ = incomplete.partition("/")
        if not slash and not before:
            found = [word for one in kinds.all() for word in (str(one["plural"]), str(one["name"]))]
            return sorted(word for word in found if word.startswith(incomplete))
        prefix = f"{kind}/" if slash else ""
        word = kind if slash else before[0].partition("/")[0]
        plural = str(kinds.named(word)["plural"])
        page = next(fleet.resource(plural).pages(Query(scope=fleet.endpoint.scope)))[0]
        names = (f"{prefix}{one['metadata']['name']}" for one in page)
        return [name for name in names if name.startswith(incomplete) and name.isprintable()]
