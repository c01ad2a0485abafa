"""The tokens of the edge: what they say, and whether one that is shown is good.

A node's token names the node, its tenant and, by thumbprint, the key that must sign along with it;
an enrollment token lets one machine in, once. Both are JWTs under the same RS256 keys and are told
apart by their audience, which a node's token does not have. Decides what tokens say and how long;
which nodes there are is `nodes`' business, and that an enrollment happens once `enrolment`'s.

A daemon shows the same token with every event, so a token's signature is checked once and its
claims are remembered. Its end and the blacklist are looked at every time.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from fleetplane.domains.edge.kinds import (
    BLACKLISTED,
    BlacklistedSpec,
    NodeResources,
    WorkerRole,
    check_tenant,
)
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, Unauthenticated
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.signing import LEEWAY_SECONDS, LONGEST_LIFE_SECONDS, SigningKeys
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.ids import check_uuid, new_uuid

PURPOSE = "edge-tokens"
ENROLLMENT_AUDIENCE = "edge-enrollment"
USER_AUDIENCE = "edge-command"
EDGE_ROLE = "edge"
ENROLLMENT_LIMIT_SECONDS = 900.0
LABEL_LIMIT = 128
"""Characters of the name that a machine is to have."""
REMEMBERED_LIMIT = 16_384
"""Verified tokens; about 400 bytes each. More daemons than that cost a signature check per event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeClaims:
    node_id: str
    tenant: str
    """Empty for nodes of the cluster itself."""
    role: str
    jti: str
    expires_at_ns: int
    thumbprint: str
    """Of the key it is bound to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrollmentClaims:
    tenant: str
    label: str
    jti: str
    expires_at_ns: int
    node_id: str = ""
    """The only node that it is for; empty: for one that does not exist yet."""
    replace: bool = False
    """That node may be taken over with another key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentToken:
    token: str
    jti: str
    issued_at_ns: int
    expires_at_ns: int


@lru_cache(maxsize=REMEMBERED_LIMIT)
def thumbprint(public_key: bytes) -> str:
    """The RFC 7638 thumbprint of an Ed25519 key."""
    jwk = {"crv": "Ed25519", "kty": "OKP", "x": _base64url(public_key)}
    return _base64url(hashlib.sha256(_compact(jwk)).digest())


def capabilities_digest(resources: NodeResources, tags: tuple[str, ...] = ()) -> str:
    """What a token says of what its node can do."""
    document = {
        "gpu_count": resources.gpu_count,
        "vram_gb": resources.vram_gb,
        "cpu_cores": resources.cpu_cores,
        "available_memory_gb": resources.memory_gb,
        "supported_runtimes": list(resources.runtimes),
        "tags": list(tags),
    }
    return hashlib.sha256(_compact(document)).hexdigest()


class NodeTokens:
    """See `load`; the constructor takes keys that have been loaded."""

    def __init__(
        self,
        keys: SigningKeys,
        store: Store,
        clock: Clock,
        *,
        issuer: str,
        endpoint: Callable[[], str],
        server_public_key: bytes,
    ) -> None:
        """`endpoint` says where daemons dial in, which may be known only once the server listens."""
        self._keys = keys
        self._store = store
        self._clock = clock
        self._issuer = issuer
        self._endpoint = endpoint
        self._server_public_key = server_public_key
        self._verified: OrderedDict[bytes, NodeClaims] = OrderedDict()
        self.checked = 0
        """Signatures that had to be checked."""

    def __repr__(self) -> str:
        return f"<NodeTokens remembered={len(self._verified)} checked={self.checked}>"

    @classmethod
    async def load(
        cls,
        store: Store,
        master: MasterKey,
        clock: Clock,
        *,
        issuer: str,
        endpoint: Callable[[], str],
        server_public_key: bytes,
        longest_life_seconds: float = LONGEST_LIFE_SECONDS,
    ) -> NodeTokens:
        keys = await SigningKeys.load_or_create(
            store,
            master,
            clock,
            purpose=PURPOSE,
            algorithm="RS256",
            longest_life_seconds=longest_life_seconds,
        )
        return cls(keys, store, clock, issuer=issuer, endpoint=endpoint, server_public_key=server_public_key)

    @property
    def endpoint(self) -> str:
        return self._endpoint()

    def jwks(self) -> dict[str, list[dict[str, str]]]:
        return self._keys.jwks()

    # Nodes.

    def issue_node(
        self, node_id: str, tenant: str, public_key: bytes, *, life_seconds: float
    ) -> EnrolmentToken:
        """For an edge daemon."""
        claims = {
            "sub": node_id,
            "role": EDGE_ROLE,
            "cap_hash": capabilities_digest(NodeResources()),
            "tid": tenant,
            "cep": self._endpoint(),
            "cnf": {"jkt": thumbprint(public_key)},
        }
        return self._issue(claims, life_seconds)

    def issue_worker(
        self,
        node_id: str,
        role: WorkerRole,
        public_key: bytes,
        *,
        capabilities: NodeResources,
        tags: tuple[str, ...],
        life_seconds: float,
    ) -> EnrolmentToken:
        claims = {
            "sub": node_id,
            "role": role.value,
            "cap_hash": capabilities_digest(capabilities, tags),
            "cnf": {"jkt": thumbprint(public_key)},
        }
        return self._issue(claims, life_seconds)

    def verify_node(
        self, token: str, *, allow_expired: bool = False, allow_blacklisted: bool = False
    ) -> NodeClaims:
        """Whose token it is; `details["cause"]` of the refusal says what is wrong with it."""
        digest = hashlib.sha256(token.encode()).digest()
        claims = self._verified.get(digest)
        if claims is None:
            claims = self._verified[digest] = self._read_node(token)
            if len(self._verified) > REMEMBERED_LIMIT:
                self._verified.popitem(last=False)
        else:
            self._verified.move_to_end(digest)
        if not allow_expired:
            late_ns = self._clock.now_ns() - claims.expires_at_ns
            if late_ns >= LEEWAY_SECONDS * 1e9:
                raise _refused("expired", "the token has expired")
        if not allow_blacklisted and self.is_blacklisted(claims.jti):
            raise _refused("blacklisted", "the token was replaced or revoked")
        return claims

    def _read_node(self, token: str) -> NodeClaims:
        self.checked += 1
        claims = self._keys.verify(token, expired_too=True)
        if "aud" in claims:
            raise _refused("audience", "the token is not a node's")
        confirmed = claims.get("cnf")
        bound = confirmed.get("jkt") if isinstance(confirmed, dict) else None
        texts = (claims.get("sub"), claims.get("role"), claims.get("jti"), bound, claims.get("tid", ""))
        node_id, role, jti, key, tenant = (text if isinstance(text, str) else None for text in texts)
        if not node_id or not role or not jti or not key or tenant is None:
            raise _refused("malformed", "the token lacks claims of a node's token")
        return NodeClaims(
            node_id=node_id, tenant=tenant, role=role, jti=jti, thumbprint=key, expires_at_ns=_ends(claims)
        )

    # Enrollment.

    def issue_enrollment(
        self, tenant: str, issued_to: str, *, life_seconds: float, node_id: str = "", replace: bool = False
    ) -> EnrolmentToken:
        if not 0 < life_seconds <= ENROLLMENT_LIMIT_SECONDS:
            raise InvalidArgument(
                f"an enrollment token lives up to {ENROLLMENT_LIMIT_SECONDS:g} s, not {life_seconds:g}",
                field="ttl_seconds",
            )
        claims: dict[str, object] = {
            "tid": check_tenant(tenant),
            "sub": check_label(issued_to),
            "aud": ENROLLMENT_AUDIENCE,
            "iss": self._issuer,
            "cep": self._endpoint(),
            "spk": _base64url(self._server_public_key),
        }
        if node_id:
            claims |= {"nid": node_id, "rpl": replace}
        return self._issue(claims, life_seconds)

    def verify_enrollment(self, token: str) -> EnrollmentClaims:
        """What a token that is ours, in time and for enrollment says; not whether it was used."""
        claims = self._keys.verify(token, audience=ENROLLMENT_AUDIENCE)
        if claims.get("iss") != self._issuer:
            raise _refused("issuer", "the token is of another issuer")
        if claims.get("nbf") is None:
            raise _refused("malformed", "the token has no `nbf` claim")
        try:
            return EnrollmentClaims(
                tenant=check_tenant(str(claims.get("tid", ""))),
                label=check_label(str(claims.get("sub", ""))),
                jti=check_uuid(str(claims.get("jti", "")), field="jti"),
                expires_at_ns=_ends(claims),
                node_id=check_uuid(str(claims["nid"]), field="nid") if "nid" in claims else "",
                replace=claims.get("rpl") is True,
            )
        except InvalidArgument as error:
            raise _refused("malformed", f"the token is not one for enrollment: {error.message}") from error

    # Users.

    def issue_user(
        self, *, subject: str, tenant: str, context: str, command_id: str, life_seconds: float
    ) -> str:
        """Who wants one command done, for the daemon that does it."""
        claims = {
            "sub": subject,
            "tid": tenant,
            "scp": context,
            "aud": USER_AUDIENCE,
            "iss": self._issuer,
            "jti": command_id,
        }
        return self._keys.sign(claims, life_seconds=life_seconds)

    # The blacklist.

    def is_blacklisted(self, jti: str) -> bool:
        return self._store.get(BLACKLISTED, "", jti) is not None

    def _issue(self, claims: Mapping[str, object], life_seconds: float) -> EnrolmentToken:
        jti = new_uuid(self._clock)
        now_ns = self._clock.now_ns()
        ends = (now_ns + round(life_seconds * 1e9)) // 1_000_000_000
        token = self._keys.sign({"jti": jti, **claims, "exp": ends}, life_seconds=life_seconds)
        return EnrolmentToken(token=token, jti=jti, issued_at_ns=now_ns, expires_at_ns=ends * 1_000_000_000)


def blacklist(draft: Draft, jti: str, *, node_id: str, reason: str, expires_at_ns: int) -> None:
    """Refuse a token from now on, as part of the caller's transaction, which must touch it."""
    if draft.get(BLACKLISTED, "", jti) is None:
        spec = BlacklistedSpec(
            node_id=node_id, reason=reason, at_ns=draft.now_ns, expires_at_ns=expires_at_ns
        )
        draft.put(BLACKLISTED, "", jti, spec=spec)


def check_label(text: str, *, field: str = "issued_to") -> str:
    """The name that a machine is shown under; may be empty."""
    if len(text) > LABEL_LIMIT or not text.isprintable():
        raise InvalidArgument(f"{field} must be at most {LABEL_LIMIT} printable characters", field=field)
    return text.strip()


def _ends(claims: Mapping[str, object]) -> int:
    ends = claims["exp"]
    assert isinstance(ends, int | float)  # a token without it is not verified
    return round(ends * 1e9)


def _compact(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def _base64url(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _refused(cause: str, message: str) -> Unauthenticated:
    return Unauthenticated(message, details={"cause": cause})
