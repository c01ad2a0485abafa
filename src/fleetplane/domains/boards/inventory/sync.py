"""How another server takes over what is known of boards and clusters, and keeps up with it.

It asks with the last revision that it knows and gets what has changed since, deletions included, in
the order of revisions; every change has one of its own, so the next request simply goes on after the
last of a page. Without a revision, or with one that is no longer kept (which it is told), it gets everything
that there is, in pages; whatever changes while it reads them, it gets with its next request,
because the pages carry the revision at which the first of them was made.

A cluster on a page holds only those of its nodes that the page is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.kinds import BOARD, CLUSTER, SCOPE, Board, Cluster, number_of
from fleetplane.kernel.errors import Compacted, InvalidArgument, NotFound
from fleetplane.kernel.events import Event, EventType, coalesce
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store

PAGE_DEFAULT = 500
PAGE_LIMIT = 2000
"""Boards and clusters on one page; at half a kilobyte each a quarter of the message limit."""
TOKEN_LIMIT = 64
COMPACTED = "COMPACTED"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPage:
    revision: int
    full: bool
    clusters: Sequence[Cluster] = ()
    boards: Sequence[Board] = ()
    deleted_clusters: Sequence[int] = ()
    deleted_boards: Sequence[int] = ()
    has_more: bool = False
    token: str = ""
    """Of the next page of a snapshot; a page of changes needs none."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    known_revision: int = 0
    full: bool = False
    cluster: int | None = None
    page_size: int = 0
    token: str = ""

    @property
    def size(self) -> int:
        return min(self.page_size, PAGE_LIMIT) if self.page_size > 0 else PAGE_DEFAULT


class Synchronisation:
    def __init__(self, store: Store, boards: Boards, clusters: Clusters) -> None:
        self._store = store
        self._boards = boards
        self._clusters = clusters

    def __repr__(self) -> str:
        return f"<Synchronisation revision={self._store.revision}>"

    async def page(self, question: Question) -> SyncPage:
        if question.cluster is not None and self._clusters.get(question.cluster) is None:
            raise NotFound(f"cluster {question.cluster} is not known", field="cluster_id")
        if question.token:
            return self._snapshot(question, _SnapshotPlace.parse(question.token))
        if question.full or not question.known_revision:
            return self._snapshot(question, _SnapshotPlace(revision=self._store.revision))
        try:
            return await self._changes(question)
        except Compacted:
            place = _SnapshotPlace(revision=self._store.revision)
            return self._snapshot(question, place, reason=COMPACTED)

    # Everything.

    def _snapshot(self, question: Question, place: _SnapshotPlace, *, reason: str = "") -> SyncPage:
        if place.revision > self._store.revision:
            raise InvalidArgument("page_token is not one of this server", field="page_token")
        wanted = question.cluster
        clusters = [
            found
            for found in self._clusters.all()
            if number_of(found) > place.cluster and wanted in (None, number_of(found))
        ]
        boards = [
            found
            for found in self._boards.all()
            if number_of(found) > place.board and wanted in (None, found.spec.cluster_id)
        ]
        page_clusters = clusters[: question.size]
        page_boards = boards[: question.size - len(page_clusters)]
        has_more = len(page_clusters) + len(page_boards) < len(clusters) + len(boards)
        following = _SnapshotPlace(
            revision=place.revision,
            cluster=number_of(page_clusters[-1]) if page_clusters else place.cluster,
            board=number_of(page_boards[-1]) if page_boards else place.board,
        )
        return SyncPage(
            revision=place.revision,
            full=True,
            clusters=page_clusters,
            boards=page_boards,
            has_more=has_more,
            token=str(following) if has_more else "",
            reason=reason,
        )

    # What changed.

    async def _changes(self, question: Question) -> SyncPage:
        target = self._store.revision
        events = [
            event
            for kind in (CLUSTER, BOARD)
            for event in await self._since(kind, question.known_revision, target)
        ]
        events.sort(key=lambda event: event.revision)
        taken = events[: question.size]
        changed = _Changed(wanted=question.cluster)
        for event in taken:
            changed.note(event)
        has_more = len(taken) < len(events)
        return SyncPage(
            revision=taken[-1].revision if has_more else target,
            full=False,
            clusters=list(changed.clusters.values()),
            boards=list(changed.boards.values()),
            deleted_clusters=sorted(changed.deleted_clusters),
            deleted_boards=sorted(changed.deleted_boards),
            has_more=has_more,
        )

    async def _since(self, kind: AnyKind, after: int, target: int) -> list[Event]:
        """What changed of a kind up to the target, and only what still matters of it."""
        events: list[Event] = []
        async with self._store.watch(kind, SCOPE, after=after) as watch:
            while watch.revision < target:
                events += (await watch.next(idle_seconds=0.0)).events
        return [event for event in coalesce(events) if event.revision <= target]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SnapshotPlace:
    """Where a snapshot goes on: after these, as of that revision."""

    revision: int
    cluster: int = 0
    board: int = 0

    def __str__(self) -> str:
        return f"{self.revision}.{self.cluster}.{self.board}"

    @classmethod
    def parse(cls, text: str) -> _SnapshotPlace:
        parts = text.split(".") if len(text) <= TOKEN_LIMIT and text.isascii() else []
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            raise InvalidArgument("page_token is not one of this server", field="page_token")
        revision, cluster, board = map(int, parts)
        return cls(revision=revision, cluster=cluster, board=board)


@dataclass(slots=True, kw_only=True)
class _Changed:
    """The last event of each resource."""

    wanted: int | None
    clusters: dict[int, Cluster] = field(default_factory=dict)
    boards: dict[int, Board] = field(default_factory=dict)
    deleted_clusters: set[int] = field(default_factory=set)
    deleted_boards: set[int] = field(default_factory=set)

    def note(self, event: Event) -> None:
        found, number = event.resource, number_of(event.resource)
        is_board = found.kind == BOARD.name
        if not is_board and self.wanted not in (None, number):
            return
        # Seen from one cluster, a board that is elsewhere now is gone.
        is_elsewhere = is_board and self.wanted not in (None, found.spec.cluster_id)
        gone = event.type is EventType.DELETED or is_elsewhere
        live: dict[int, Board] | dict[int, Cluster] = self.boards if is_board else self.clusters
        deleted = self.deleted_boards if is_board else self.deleted_clusters
        live.pop(number, None)
        deleted.discard(number)
        if gone:
            deleted.add(number)
        else:
            live[number] = found
