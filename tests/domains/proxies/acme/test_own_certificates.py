from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.proxies.serving.certificates import material
from fleetplane.web.rest.problems import Rejected


def test_a_chain_in_order_is_taken_and_one_that_does_not_hang_together_is_refused(tmp_path: Path) -> None:
    now_ns = time.time_ns()
    ca, stranger = ThrowawayCa(name="ours"), ThrowawayCa(name="theirs")
    certificate, key = (path.read_text() for path in ca.server(tmp_path))
    root = ca.pem.decode()
    assert material(certificate + root, key, now_ns=now_ns).chain_pem.count("BEGIN") == 2
    for chain in (certificate + stranger.pem.decode(), certificate + stranger.pem.decode() + root):
        with pytest.raises(Rejected) as refused:
            material(chain, key, now_ns=now_ns)
        assert "CN=theirs did not issue that of" in str(refused.value.problems)


def test_what_was_pasted_in_any_order_becomes_a_chain(tmp_path: Path) -> None:
    now_ns = time.time_ns()
    ca = ThrowawayCa(name="ours")
    certificate, key = (path.read_text() for path in ca.server(tmp_path))
    root = ca.pem.decode()
    in_order = material(certificate + root, key, now_ns=now_ns)
    for pasted in (root + certificate, root + certificate + root + certificate):
        assert material(pasted, key, now_ns=now_ns) == in_order


def test_what_is_wrong_with_a_file_is_told(tmp_path: Path) -> None:
    now_ns = time.time_ns()
    ca = ThrowawayCa(name="ours")
    certificate, key = (path.read_text() for path in ca.server(tmp_path))
    request = "-----BEGIN CERTIFICATE REQUEST-----\nMA==\n-----END CERTIFICATE REQUEST-----\n"
    encrypted = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMA==\n-----END ENCRYPTED PRIVATE KEY-----\n"
    _, other = (path.read_text() for path in ca.server(tmp_path))
    for chain, private, field, words in (
        (certificate + key, key, "certificate", "Holds a private key"),
        (request, key, "certificate", "a request for one"),
        ("nothing", key, "certificate", "Not a certificate in PEM"),
        (certificate * 3000, key, "certificate", "Too long"),
        (certificate, encrypted, "private_key", "openssl pkey"),
        (certificate, certificate, "private_key", "but a certificate"),
        (certificate, other, "private_key", "CN=nstance-server"),
    ):
        with pytest.raises(Rejected) as refused:
            material(chain, private, now_ns=now_ns)
        (problem,) = refused.value.problems
        assert (problem.field, words in problem.message) == (field, True), problem.message
    with pytest.raises(Rejected) as refused:
        material(certificate, key, now_ns=now_ns + 2 * 86_400 * 10**9)
    assert refused.value.problems[0].message.startswith("Has expired: ")


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
