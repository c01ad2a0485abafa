from __future__ import annotations

import time
from pathlib import Path

import pytest
from throwaway_ca import ThrowawayCa

from fleetplane.domains.proxies.certificates import material
from fleetplane.web.problems import Rejected


def test_a_chain_in_order_is_taken_and_one_that_does_not_hang_together_is_refused(tmp_path: Path) -> None:
    now_ns = time.time_ns()
    ca, stranger = ThrowawayCa(name="ours"), ThrowawayCa(name="theirs")
    certificate, key = (path.read_text() for path in ca.server(tmp_path))
    root = ca.pem.decode()
    assert material(certificate + root, key, now_ns=now_ns).chain_pem.count("BEGIN") == 2
    for chain in (certificate + stranger.pem.decode(), certificate + stranger.pem.decode() + root):
        with pytest.raises(Rejected) as refused:
            material(chain, key, now_ns=now_ns)
        assert "Certificate 1 was not issued by the one after it" in str(refused.value.problems)


def test_an_issuer_of_the_same_name_with_another_key_is_refused(tmp_path: Path) -> None:
    certificate, key = (path.read_text() for path in ThrowawayCa(name="twin").server(tmp_path))
    with pytest.raises(Rejected):
        material(certificate + ThrowawayCa(name="twin").pem.decode(), key, now_ns=time.time_ns())


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    ca = ThrowawayCa()
    certificate, _ = (path.read_text() for path in ca.server(tmp_path))
    _, other = (path.read_text() for path in ca.server(tmp_path))
    with pytest.raises(Rejected):
        material(certificate, other, now_ns=time.time_ns())
