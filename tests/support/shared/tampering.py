"""What somebody altered on its way."""

from __future__ import annotations


def altered(text: str) -> str:
    """The same with another character in its middle.

    A fixed ending would be what a random text of base64 ends in already, once in some hundreds of times, all
    the more as its last character has bits that no reader looks at.
    """
    middle = len(text) // 2
    return text[:middle] + ("A" if text[middle] != "A" else "B") + text[middle + 1 :]
