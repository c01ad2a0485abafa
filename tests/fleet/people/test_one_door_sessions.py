"""Logins, sessions and links at the one door."""

from __future__ import annotations

import json

import httpx
from support.fleet.one_door import PASSWORD, SECONDS, SURFACES, TENANT, Site
from support.shared.tampering import altered


def test_no_page_of_somebody_else_signs_a_browser_in(site: Site, owner: str) -> None:
    """Else a victim would work in the attacker's account, and leave there what they type."""
    site.account(owner, "attacker")
    url = f"{site.server.web}/apis/v1/people/console"
    body = json.dumps({"name": "attacker", "password": PASSWORD})
    # All that a form, or a script of another origin without our leave, can send.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        headers = {"content-type": kind} if kind else {}
        answer = site.http.post(url, content=body, headers=headers)
        assert answer.status_code == 400, kind
        assert "set-cookie" not in answer.headers
    good = {"content-type": "application/json"}
    crossed = (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
    )
    for path in ("", "/token", "/link"):
        for shown in crossed:
            sent = body if path != "/link" else json.dumps({"code": "x"})
            answer = site.http.post(url + path, content=sent, headers={**good, **shown})
            assert answer.status_code == 403, (path, shown)
            assert "set-cookie" not in answer.headers
    own = {"origin": site.server.web, "sec-fetch-site": "same-origin"}
    for shown in ({}, own):
        answer = site.http.post(url, content=body, headers={**good, **shown})
        assert answer.status_code == 200, answer.text
    # A browser asks whether a page of another origin may send JSON; it is not told so.
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    preflight = site.http.options(url, headers=asked)
    assert "access-control-allow-origin" not in preflight.headers


def test_a_kept_answer_with_a_token_is_not_given_to_one_who_lost_the_right_to_make_it(
    site: Site, owner: str
) -> None:
    admin = site.account(owner, "replayer")
    given = site.give(owner, "account/replayer", "admin", "/tenants/acme").json()["id"]
    site.give(owner, "account/replayer", "admin", "/tenants/default")
    body = {"name": "replayed", "roles": ["viewer"], "scope": "/tenants/acme", "expiresInSeconds": 3600}

    def make() -> httpx.Response:
        headers = {"authorization": f"Bearer {admin}", "idempotency-key": "once"}
        return site.http.post(f"{site.server.web}/apis/v1/people/tokens", headers=headers, json=body)

    first, again = make(), make()
    assert (first.status_code, again.json()) == (201, first.json())
    site.people("DELETE", f"/bindings/{given}", owner)
    refused = make()
    assert refused.status_code == 404
    assert first.json()["token"] not in refused.text


def test_sessions_of_every_domain_are_listed_and_ended(site: Site, owner: str) -> None:
    mine = site.account(owner, "two-logins")
    other = site.account_login("two-logins")
    login = site.log_in()
    everybody = site.people("GET", "/sessions", owner).json()["items"]
    assert {"proxies", "people"} <= {one["directory"] for one in everybody}
    own = site.people("GET", "/sessions", mine).json()["items"]
    assert {one["subject"] for one in own} == {"account/two-logins"}
    assert len(own) == 2
    foreign = next(one for one in everybody if one["directory"] == "proxies")
    assert site.people("DELETE", f"/sessions/{foreign['id']}", mine).status_code == 404

    assert site.people("POST", "/logout", other["accessToken"]).status_code == 204
    assert site.people("GET", "/whoami", other["accessToken"]).status_code == 401
    assert site.people("GET", "/whoami", mine).status_code == 200
    for one in site.people("GET", "/sessions", owner).json()["items"]:
        if one["directory"] == "proxies":
            assert site.people("DELETE", f"/sessions/{one['id']}", owner).status_code == 204
    assert site.ask("GET", "/v1/organizations", login).status_code == 401


def test_an_account_that_is_disabled_changed_or_deleted_loses_its_logins(site: Site, owner: str) -> None:
    token = site.account(owner, "leaving")
    refresh = site.account_login("leaving")["refreshToken"]
    site.give(owner, "account/leaving", "viewer", "/tenants/acme")
    assert site.people("PATCH", "/accounts/leaving", owner, {"disabled": True}).status_code == 200
    assert site.people("GET", "/whoami", token).status_code == 401
    url = f"{site.server.web}/apis/v1/people/refresh"
    assert site.http.post(url, json={"refreshToken": refresh}).status_code == 401
    site.people("PATCH", "/accounts/leaving", owner, {"disabled": False})
    token = site.account_login("leaving")["accessToken"]
    site.people("PATCH", "/accounts/leaving", owner, {"password": "another good password"})
    assert site.people("GET", "/whoami", token).status_code == 401
    assert site.people("DELETE", "/accounts/leaving", owner).status_code == 204
    again = site.account(owner, "leaving")
    assert site.people("GET", "/whoami", again).json()["roles"] == [], "a namesake inherits nothing"


def test_a_refresh_token_is_good_once_and_its_replay_ends_the_login(site: Site, owner: str) -> None:
    site.account(owner, "refreshing")
    first = site.account_login("refreshing")
    url = f"{site.server.web}/apis/v1/people/refresh"
    second = site.http.post(url, json={"refreshToken": first["refreshToken"]})
    assert second.status_code == 200, second.text
    access = second.json()["accessToken"]
    assert site.people("GET", "/whoami", access).status_code == 200
    assert site.http.post(url, json={"refreshToken": first["refreshToken"]}).status_code == 401
    assert site.people("GET", "/whoami", access).status_code == 401, "whoever replays it ends the login"


def test_a_console_session_is_a_cookie_that_changes_nothing_without_its_csrf_token(
    site: Site, owner: str
) -> None:
    site.account(owner, "console")
    site.give(owner, "account/console", "admin", "/")
    web, people = site.server.web, f"{site.server.web}/apis/v1/people"
    login = {"name": "console", "password": PASSWORD}
    with httpx.Client(timeout=SECONDS, headers=TENANT) as browser:
        opened = browser.post(f"{people}/console", json=login)
        assert opened.status_code == 200, opened.text
        cookie = opened.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
        value = cookie.partition("=")[2].partition(";")[0]
        paths = ("/v1/organizations", "/v1/edge/hosts", "/api/v1/nodes", "/v1/fleet/freezes", "/apis/v1/gpus")
        assert {browser.get(web + path).status_code for path in (*paths, "/v1/instances/groups")} == {200}

        freeze = {"domains": ["boards"], "reason": "a test", "scope": "boards"}
        told = browser.get(f"{people}/console").json()
        assert told == opened.json()
        for shown in ({}, {"x-csrf-token": ""}, {"x-csrf-token": "0" * 32}):
            assert browser.post(f"{web}/v1/fleet/freezes", json=freeze, headers=shown).status_code == 401
        csrf = {"x-csrf-token": told["csrfToken"]}
        assert browser.post(f"{web}/v1/fleet/freezes", json=freeze, headers=csrf).status_code == 201
        assert browser.delete(f"{web}/v1/fleet/freezes?scope=boards&domain=boards").status_code == 401
        lifted = browser.delete(f"{web}/v1/fleet/freezes?scope=boards&domain=boards", headers=csrf)
        assert lifted.status_code == 204

        # The cookie's value is no bearer token and no refresh token, and neither of these is a cookie.
        assert {name: ask(site, value) for name, ask in SURFACES.items()} == dict.fromkeys(SURFACES, 401)
        assert site.http.get(web + paths[0], headers={"authorization": f"Session {value}"}).status_code == 401
        assert site.http.post(f"{people}/refresh", json={"refreshToken": value}).status_code == 401
        pair = site.account_login("console")
        for other in (pair["accessToken"], pair["refreshToken"], altered(value)):
            shown = {"cookie": f"fleetplane_session={other}"}
            assert site.http.get(f"{people}/whoami", headers=shown).status_code == 401
        two = {"cookie": f"fleetplane_session={value}; fleetplane_session=x"}
        assert site.http.get(f"{people}/whoami", headers=two).status_code == 401

        assert browser.delete(f"{people}/console", headers=csrf).status_code == 204
        kept = {"cookie": f"fleetplane_session={value}"}
        assert site.http.get(f"{people}/whoami", headers=kept).status_code == 401, "it ended at the server"


def test_a_token_is_traded_for_a_session_that_is_worth_no_more_than_the_token(site: Site, owner: str) -> None:
    web, people = site.server.web, f"{site.server.web}/apis/v1/people"
    shown = {"name": "traded", "roles": ["viewer"], "scope": "/", "expiresInSeconds": 3600}
    token = site.people("POST", "/tokens", owner, shown).json()["token"]
    with httpx.Client(timeout=SECONDS, headers=TENANT, trust_env=False) as browser:
        assert browser.post(f"{people}/console/token").status_code == 401
        bearer = {"authorization": f"Bearer {token}"}
        opened = browser.post(f"{people}/console/token", headers=bearer)
        assert opened.status_code == 200, opened.text
        cookie = opened.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=Strict"} <= {part.strip() for part in cookie.split(";")}
        value = cookie.partition("=")[2].partition(";")[0]
        assert token not in value
        assert browser.get(f"{people}/whoami").json()["subject"] == "token/traded"
        assert browser.get(f"{people}/console").json() == opened.json()
        paths = ("/v1/organizations", "/v1/edge/hosts", "/api/v1/nodes", "/v1/fleet/freezes", "/apis/v1/gpus")
        assert {browser.get(web + path).status_code for path in paths} == {200}
        freeze = {"domains": ["boards"], "reason": "a test", "scope": "boards"}
        assert browser.post(f"{web}/v1/fleet/freezes", json=freeze).status_code == 401
        csrf = {"x-csrf-token": opened.json()["csrfToken"]}
        refused = browser.post(f"{web}/v1/fleet/freezes", json=freeze, headers=csrf)
        assert refused.status_code == 403, "a viewer's session is a viewer's"

        # The cookie is no bearer token, its parts are nobody's, and it is listed and ended like any session.
        assert {name: ask(site, value) for name, ask in SURFACES.items()} == dict.fromkeys(SURFACES, 401)
        for other in (value[2:], f"t.{token}", "t.", altered(value)):
            bad = {"cookie": f"fleetplane_session={other}"}
            assert site.http.get(f"{people}/whoami", headers=bad).status_code == 401
        listed = browser.get(f"{people}/sessions").json()["items"]
        assert [one["subject"] for one in listed] == ["token/traded"], "a viewer sees its own"
        assert browser.delete(f"{people}/console", headers=csrf).status_code == 204
        kept = {"cookie": f"fleetplane_session={value}"}
        assert site.http.get(f"{people}/whoami", headers=kept).status_code == 401, "it ended at the server"

        again = browser.post(f"{people}/console/token", headers=bearer)
        assert again.status_code == 200
        assert browser.get(f"{people}/whoami").status_code == 200
        assert site.people("DELETE", "/tokens/traded", owner).status_code == 204
        assert browser.get(f"{people}/whoami").status_code == 401, "it ends with its token"


def test_a_link_of_the_owner_opens_one_session(site: Site) -> None:
    address, _, code = site.run("open", "--role", "operator").strip().partition("#link=")
    assert address == f"{site.server.web}/ui/"
    redeem = f"{site.server.web}/apis/v1/people/console/link"
    with httpx.Client(timeout=SECONDS, trust_env=False) as browser:
        cookie = {"cookie": f"fleetplane_session=t.{code}"}
        assert site.http.get(f"{site.server.web}/apis/v1/gpus", headers=cookie).status_code == 401
        assert browser.post(redeem, json={"code": altered(code)}).status_code == 401
        opened = browser.post(redeem, json={"code": code})
        assert opened.status_code == 200, opened.text
        assert opened.json()["name"] == "operator/local"
        assert browser.get(f"{site.server.web}/apis/v1/gpus").status_code == 200
        csrf = {"x-csrf-token": opened.json()["csrfToken"]}
        account = {"name": "no", "password": PASSWORD}
        made_account = browser.post(f"{site.server.web}/apis/v1/people/accounts", json=account, headers=csrf)
        assert made_account.status_code == 403, "the link was an operator's"
    again = site.http.post(redeem, json={"code": code})
    assert again.status_code == 401
    assert "used before" in again.json()["detail"]


def test_a_stream_tells_nothing_more_once_the_role_that_let_it_in_is_taken(site: Site, owner: str) -> None:
    token = site.account(owner, "streaming")
    given = site.give(owner, "account/streaming", "viewer", "/tenants/acme").json()["id"]
    headers = {"authorization": f"Bearer {token}"}
    url = f"{site.server.web}/apis/v1/watch?of=freezes@/tenants/acme"
    with site.http.stream("GET", url, headers=headers) as answer:
        assert answer.status_code == 200
        chunks = answer.iter_text()
        site.run("instances", "freeze", "--tenant", "acme", "--reason", "told to viewers")
        while "told to viewers" not in next(chunks):
            pass
        assert site.people("DELETE", f"/bindings/{given}", owner).status_code == 204
        site.run("instances", "freeze", "--tenant", "acme", "--reason", "told to none")
        told = ""
        while "event: bookmark" not in told:
            told += next(chunks)
        assert "told to none" not in told
    site.run("instances", "unfreeze", "--tenant", "acme")
    assert site.http.get(url, headers=headers).status_code == 403
