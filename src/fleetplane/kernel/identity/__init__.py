"""Who a caller is, and how it can prove it: master key, certificate authority, tokens."""

from fleetplane.kernel.identity.authority import Authority, Issued
from fleetplane.kernel.identity.master_key import MasterKey
from fleetplane.kernel.identity.tokens import Tokens

__all__ = ["Authority", "Issued", "MasterKey", "Tokens"]
