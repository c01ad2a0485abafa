"""An authority may refuse nonces for no reason: requests are made again with new ones, within reason."""

from __future__ import annotations

from typing import Any

import pytest
import requests
from acme import client, messages

from fleetplane.domains.proxies.acme.authority import NONCE_TRIES, _Network

MOST = 2 * NONCE_TRIES
"""Requests for one question."""


class Refusing:
    """Answers after so many refusals."""

    def __init__(self, refusals: int, code: str = "badNonce") -> None:
        self.refusals, self.code = refusals, code
        self.asked = 0

    def __call__(self, *_: Any, **__: Any) -> requests.Response:
        self.asked += 1
        if self.asked <= self.refusals:
            raise messages.Error.with_code(self.code)
        return requests.Response()


@pytest.mark.parametrize("refusals", [0, 1, 2, 3, MOST - 1])
def test_a_refused_nonce_is_replaced_again_and_again(monkeypatch: pytest.MonkeyPatch, refusals: int) -> None:
    authority = Refusing(refusals)
    monkeypatch.setattr(client.ClientNetwork, "_post_once", authority)
    assert isinstance(_Network().post("https://authority.test/order"), requests.Response)
    assert authority.asked == refusals + 1


@pytest.mark.parametrize(("code", "asked"), [("badNonce", MOST), ("unauthorized", 1)])
def test_what_is_refused_for_good_is_told(monkeypatch: pytest.MonkeyPatch, code: str, asked: int) -> None:
    authority = Refusing(MOST, code)
    monkeypatch.setattr(client.ClientNetwork, "_post_once", authority)
    with pytest.raises(messages.Error) as caught:
        _Network().post("https://authority.test/order")
    assert (caught.value.code, authority.asked) == (code, asked)
