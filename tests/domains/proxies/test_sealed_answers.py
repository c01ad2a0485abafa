"""What an agent seals is read by the question that it answers, and by nobody else."""

from __future__ import annotations

import pytest

from fleetplane.domains.proxies.sealed_answers import PUBLIC_BYTES, Opener, seal


def test_only_the_question_that_was_asked_reads_the_answer() -> None:
    asked, other = Opener(), Opener()
    sealed = seal(b"a key", asked.public)
    assert asked.opened(sealed) == b"a key"
    assert b"a key" not in sealed
    assert seal(b"a key", asked.public) != sealed
    with pytest.raises(ValueError, match="not sealed to this question"):
        other.opened(sealed)
    for at in (0, PUBLIC_BYTES, len(sealed) - 1):
        changed = bytearray(sealed)
        changed[at] ^= 1
        with pytest.raises(ValueError, match="not sealed"):
            asked.opened(bytes(changed))
    with pytest.raises(ValueError, match="32 bytes"):
        asked.opened(sealed[:10])
    with pytest.raises(ValueError, match="computing shared key"):
        asked.opened(bytes(PUBLIC_BYTES) + b"x" * 20)
    with pytest.raises(ValueError, match="32 bytes"):
        seal(b"x", b"short")
