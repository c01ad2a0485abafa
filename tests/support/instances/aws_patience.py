"""How long a server of AWS's API is waited for that a busy machine lets wait."""

from __future__ import annotations

AWS_PATIENCE = {"connect_timeout_seconds": 60.0, "read_timeout_seconds": 60.0}
"""It makes a whole region before its first answer; a question that is repeated may be done twice."""
