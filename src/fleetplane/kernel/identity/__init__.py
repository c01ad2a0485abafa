"""Who a caller is, and how it can prove it: keys, certificates, tokens, and their revocation."""

from fleetplane.kernel.identity.authority import Authority, IssuedCertificate
from fleetplane.kernel.identity.certificates import CertificateIdentity, LeafProfile, LeafUsage, peer_identity
from fleetplane.kernel.identity.master_key import MasterKey
from fleetplane.kernel.identity.tokens import OneTimeTokens

__all__ = [
    "Authority",
    "CertificateIdentity",
    "IssuedCertificate",
    "LeafProfile",
    "LeafUsage",
    "MasterKey",
    "OneTimeTokens",
    "peer_identity",
]
