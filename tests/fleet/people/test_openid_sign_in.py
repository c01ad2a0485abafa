"""People sign in with a real OpenID provider: there, back, and in, on a real server."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from support.shared.browser_rig import Tab, needs_chromium, tab
from support.shared.cli_runner import COMMAND
from support.shared.openid_process import OpenIDProcess, openid_process
from support.shared.server_process import ServerProcess, running_server

from fleetplane.cli.main import run
from fleetplane.client.contexts import ContextFile

SECONDS = 60.0
PASSWORD = "correct horse battery"


@dataclass(frozen=True, slots=True)
class Company:
    folder: Path
    server: ServerProcess
    provider: OpenIDProcess
    owner: str
    """A token that may do everything."""

    @property
    def people(self) -> str:
        return f"{self.server.web}/apis/v1/people"

    def begin(self, browser: httpx.Client, query: str = "") -> str:
        """Where the server sends a browser to sign in."""
        answer = browser.get(f"{self.people}/oidc/login{query}")
        assert answer.status_code == 302, answer.text
        return str(answer.headers["location"])

    def sign_in(self, browser: httpx.Client, subject: str) -> httpx.Response:
        return browser.get(self.provider.approve(browser, self.begin(browser), subject))

    def ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.owner}"}
        return httpx.request(method, self.people + path, headers=headers, json=body, timeout=SECONDS)


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    folder = tmp_path_factory.mktemp("d")
    secret = folder.parent / "client-secret"
    secret.write_text("s3cret\n")
    with openid_process() as provider:
        settings = [
            f"oidc.issuer={provider.issuer}",
            "oidc.client_id=fleet",
            f"oidc.client_secret_file={secret}",
            "oidc.roles=sre=operator@/tenants/acme",
            "oidc.name=Example",
        ]
        words = [word for one in settings for word in ("--set", one)]
        with running_server(folder, "--only", "edge", *words) as server:
            with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()):
                assert run(["tokens", "create", "all", "--role", "owner", "--data-dir", str(folder)]) == 0
            yield Company(folder, server, provider, out.getvalue().split()[-1])


@pytest.fixture
def browser() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=SECONDS) as browser:
        yield browser


def test_a_person_signs_in_at_the_provider_and_holds_the_roles_of_their_groups(
    company: Company, browser: httpx.Client
) -> None:
    company.provider.person("u-1", preferred_username="Ann", name="Ann Example", groups=["sre", "all"])
    told = browser.get(f"{company.people}/oidc").json()
    assert told == {"enabled": True, "name": "Example", "login": "/apis/v1/people/oidc/login"}

    asked = company.begin(browser, "?next=/ui/%23/gpus")
    query = {name: values[0] for name, values in parse_qs(urlsplit(asked).query).items()}
    assert query["redirect_uri"] == f"{company.people}/oidc/callback"
    assert (query["response_type"], query["code_challenge_method"]) == ("code", "S256")
    answer = browser.get(company.provider.approve(browser, asked, "u-1"))

    assert (answer.status_code, answer.headers["location"]) == (302, "/ui/#/gpus"), answer.text
    cookies = answer.headers.get_list("set-cookie")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in cookies[0].split(";")}
    assert "fleetplane_oidc=; Max-Age=0" in cookies[1]
    who = browser.get(f"{company.people}/whoami").json()
    assert (who["name"], who["subject"]) == ("account/ann", "account/ann")
    origin = "group/sre is bound to operator at /tenants/acme"
    assert who["roles"] == [{"role": "operator", "scope": "/tenants/acme", "origin": origin}]
    nodes = "/apis/v1/scopes/tenants/acme/edge-nodes"
    assert browser.get(company.server.web + nodes).status_code == 200

    # A group can also be given roles like anybody else, and the session ends like any other.
    given = company.ask("POST", "/bindings", {"subject": "group/all", "role": "viewer", "scope": "/"})
    scopes = {one["scope"] for one in browser.get(f"{company.people}/whoami").json()["roles"]}
    assert scopes == {"/", "/tenants/acme"}
    assert company.ask("DELETE", f"/bindings/{given.json()['id']}").status_code == 204
    mine = [one for one in company.ask("GET", "/sessions").json()["items"] if one["name"] == "ann"]
    assert len(mine) == 1
    company.ask("DELETE", f"/sessions/{mine[0]['id']}")
    assert browser.get(f"{company.people}/whoami").status_code == 401

    # Who left a group holds its roles no more, once they have signed in again.
    company.provider.person("u-1", preferred_username="somebody-else", groups=[])
    assert company.sign_in(browser, "u-1").status_code == 302
    who = browser.get(f"{company.people}/whoami").json()
    assert (who["name"], who["roles"]) == ("account/ann", [])


def test_a_person_is_never_taken_for_another_of_the_same_name_or_address(
    company: Company, browser: httpx.Client
) -> None:
    made = {"name": "boss", "password": PASSWORD, "email": "boss@example.com"}
    assert company.ask("POST", "/accounts", made).status_code == 201
    company.ask("POST", "/bindings", {"subject": "account/boss", "role": "owner", "scope": "/"})
    company.ask("POST", "/bindings", {"subject": "account/planned", "role": "owner", "scope": "/"})
    claims = {"email": "boss@example.com", "email_verified": True}
    company.provider.person("u-2", preferred_username="boss", **claims)
    company.provider.person("u-3", preferred_username="planned", **claims)
    company.provider.person("u-4", preferred_username="../etc\n", **claims)
    names = []
    for subject in ("u-2", "u-3", "u-4"):
        assert company.sign_in(browser, subject).status_code == 302
        who = browser.get(f"{company.people}/whoami").json()
        assert who["roles"] == []
        names.append(who["name"])
    assert names[0].startswith("account/boss-")
    listed = {one["subject"]: one["vouchedBy"] for one in company.ask("GET", "/accounts").json()["items"]}
    assert listed[names[0]] == f"{company.provider.issuer} u-2", "administrators see who it is"
    assert listed["account/boss"] == ""
    assert names[1].startswith("account/planned-"), "bound in advance to somebody whom an owner meant"
    assert names[2] == "account/boss@example.com"
    # One without a password has none that could be guessed.
    login = {"name": names[0].removeprefix("account/"), "password": ""}
    assert httpx.post(f"{company.people}/login", json=login, timeout=SECONDS).status_code == 401


def test_a_disabled_person_does_not_come_in_and_a_deleted_one_comes_as_a_stranger(
    company: Company, browser: httpx.Client
) -> None:
    company.provider.person("u-5", preferred_username="leaver")
    company.sign_in(browser, "u-5")
    company.ask(
        "POST", "/bindings", {"subject": "account/leaver", "role": "viewer", "scope": "/tenants/acme"}
    )
    company.ask("PATCH", "/accounts/leaver", {"disabled": True})
    assert browser.get(f"{company.people}/whoami").status_code == 401
    assert company.sign_in(browser, "u-5").status_code == 403
    assert company.ask("DELETE", "/accounts/leaver").status_code == 204
    assert company.sign_in(browser, "u-5").status_code == 302
    assert browser.get(f"{company.people}/whoami").json()["roles"] == []


def test_a_code_is_good_once_and_only_in_the_browser_that_asked_for_it(
    company: Company, browser: httpx.Client
) -> None:
    company.provider.person("u-6", preferred_username="replayed")
    back = company.provider.approve(browser, company.begin(browser), "u-6")
    kept = dict(browser.cookies)
    with httpx.Client(timeout=SECONDS) as another:
        # A stranger's browser is made to finish what this one began: it would be signed in as somebody else.
        assert another.get(back).status_code == 401
        company.begin(another)
        assert another.get(back).status_code == 401, "nor in place of a sign-in of its own"
    assert browser.get(back + "x").status_code == 401, "another state"
    assert browser.get(back).status_code == 302
    with httpx.Client(timeout=SECONDS, cookies=kept) as thief:
        assert thief.get(back).status_code == 401, "even with the cookie"
    with httpx.Client(timeout=SECONDS) as thief:
        # A new sign-in of the thief's, with the code that was used before.
        begun = parse_qs(urlsplit(company.begin(thief)).query)["state"][0]
        code = parse_qs(urlsplit(back).query)["code"][0]
        refused = thief.get(f"{company.people}/oidc/callback", params={"code": code, "state": begun})
        assert refused.status_code == 401
        assert "used before" in refused.text


@pytest.mark.parametrize(
    "place",
    ["https://evil.example/", "//evil.example/ui/", "/ui", "/uix/", "/\\evil.example", "/ui/\r\nx: y", "ui/"],
)
def test_a_sign_in_leads_nowhere_but_into_the_console(
    company: Company, browser: httpx.Client, place: str
) -> None:
    answer = browser.get(f"{company.people}/oidc/login", params={"next": place})
    assert answer.status_code == 400
    assert "location" not in answer.headers
    assert "set-cookie" not in answer.headers


def test_who_refuses_at_the_provider_or_brings_a_group_of_the_wrong_type_does_not_come_in(
    company: Company, browser: httpx.Client
) -> None:
    state = parse_qs(urlsplit(company.begin(browser)).query)["state"][0]
    callback = f"{company.people}/oidc/callback"
    denied = browser.get(callback, params={"state": state, "error": "access_denied", "session_state": "x"})
    assert denied.status_code == 403
    assert "access_denied" in denied.text
    state = parse_qs(urlsplit(company.begin(browser)).query)["state"][0]
    mixed = browser.get(callback, params={"state": state, "code": "c", "iss": "https://evil.example"})
    assert mixed.status_code == 401
    for groups in ("sre", {"sre": True}, [["sre"]], [1], ["sre", ""]):
        company.provider.person("u-7", groups=groups)
        refused = company.sign_in(browser, "u-7")
        assert refused.status_code == 401, groups
        assert "is no list of names" in refused.text
    assert "fleetplane_session" not in browser.cookies


# Logins of programs, approved by whoever is signed in.


@pytest.fixture
def person(company: Company, browser: httpx.Client) -> dict[str, str]:
    """Somebody who is signed in with the provider; what a request of theirs that changes something shows."""
    company.provider.person("u-8", preferred_username="device-user", groups=["sre"])
    assert company.sign_in(browser, "u-8").status_code == 302
    return {"x-csrf-token": browser.get(f"{company.people}/console").json()["csrfToken"]}


def asked(company: Company) -> dict[str, str]:
    body = {"client": "a test\u202e\n"}
    answer = httpx.post(f"{company.people}/device", json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def polled(company: Company, code: str) -> dict[str, object]:
    answer = httpx.post(f"{company.people}/device/token", json={"deviceCode": code}, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_login_is_approved_by_a_person_for_their_own_account_and_ends_with_their_session(
    company: Company, browser: httpx.Client, person: dict[str, str]
) -> None:
    one = asked(company)
    url = f"{company.people}/device/{one['userCode']}"
    told = browser.get(url).json()
    assert (told["client"], told["address"]) == ("a test", "127.0.0.1")
    approve = {"approve": True}
    assert httpx.get(url, timeout=SECONDS).status_code == 401
    assert browser.post(url, json=approve).status_code == 401, "without the CSRF token"
    for method, path in (("GET", f"/device/{one['userCode']}"), ("POST", f"/device/{one['userCode']}")):
        refused = company.ask(method, path, approve if method == "POST" else None)
        assert refused.status_code == 403, "a token of a program becomes no login"
    assert browser.post(url, json=approve, headers=person).status_code == 200
    assert browser.post(url, json=approve, headers=person).status_code == 404, "it is decided once"

    done = polled(company, one["deviceCode"])
    assert done["status"] == "approved", done
    assert polled(company, one["deviceCode"])["status"] == "expired"
    tokens = done["tokens"]
    assert isinstance(tokens, dict)
    headers = {"authorization": f"Bearer {tokens['accessToken']}"}
    who = httpx.get(f"{company.people}/whoami", headers=headers, timeout=SECONDS).json()
    assert who["name"] == "account/device-user"
    assert [role["scope"] for role in who["roles"]] == ["/tenants/acme"], "with the groups of the session"
    sessions = [
        one for one in company.ask("GET", "/sessions").json()["items"] if one["name"] == "device-user"
    ]
    ends = {one["expiresAt"] for one in sessions}
    assert len(sessions) == 2
    assert len(ends) == 1, "it ends when the session that approved it does"

    declined = asked(company)
    no = browser.post(
        f"{company.people}/device/{declined['userCode']}", json={"approve": False}, headers=person
    )
    assert no.status_code == 200
    assert polled(company, declined["deviceCode"])["status"] == "denied"

    late = asked(company)
    url = f"{company.people}/device/{late['userCode']}"
    assert browser.post(url, json=approve, headers=person).status_code == 200
    assert browser.delete(f"{company.people}/console", headers=person).status_code == 204
    assert polled(company, late["deviceCode"])["status"] == "denied", "whoever approved it has signed out"


def test_codes_cannot_be_guessed(company: Company, browser: httpx.Client) -> None:
    company.provider.person("u-9", preferred_username="guesser")
    company.sign_in(browser, "u-9")
    guesses = "BCDFGHJKLMN" * 3  # in a minute; more than ten in another are a slow machine's
    codes = [browser.get(f"{company.people}/device/BBBB-BBB{end}").status_code for end in guesses]
    assert codes[:10] == [404] * 10
    assert set(codes) == {404, 429}
    one = asked(company)
    right = [browser.get(f"{company.people}/device/{one['userCode']}").status_code for _ in guesses]
    assert 429 in right, "nor is a right one found among so many"


@needs_chromium
async def test_a_person_logs_the_command_line_in_with_a_browser(company: Company, tmp_path: Path) -> None:
    company.provider.person("u-10", preferred_username="cli-user", groups=["sre"])
    environment = {**os.environ, "FLEETPLANE_CONTEXTS": str(tmp_path / "contexts.json")}
    command = await asyncio.create_subprocess_exec(
        *COMMAND, "login", company.server.web, "--name", "there", "--oidc",
        env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert command.stderr is not None
    async with asyncio.timeout(SECONDS):
        said = (await command.stderr.readline()).decode()
    address = next(word for word in said.split() if word.startswith("http"))
    assert address.partition("=")[2] in said.partition("shows the code")[2]
    async with tab(tmp_path / "profile", address) as page:
        await shows(page, "document.querySelector('#providers a')")
        await page.value("document.querySelector('#providers a').click()")
        await shows(page, "document.querySelector('input[name=sub]')")
        await page.value(
            "(() => { const one = document.querySelector('input[name=sub]'); one.value = 'u-10';"
            " one.form.submit(); })()"
        )
        await shows(page, "document.querySelector('#request')?.hidden === false")
        assert await page.value("document.querySelector('#caller').textContent") == "account/cli-user"
        assert await page.value("document.querySelector('#facts').innerText.includes('fleetplane on')")
        await page.value("document.querySelector('#approve').click()")
        await shows(page, "document.querySelector('#done')?.textContent.startsWith('Approved')")
        async with asyncio.timeout(SECONDS):
            rest = (await command.stderr.read()).decode()
            assert await command.wait() == 0, rest
        # The console knows the session, and offers the provider to whoever has none.
        await page.call("Page.navigate", url=f"{company.server.web}/ui/")
        await shows(page, "document.querySelector('#caller')?.textContent === 'account/cli-user'")
        await page.value("document.querySelector('#sign-out').click()")
        await shows(page, "document.querySelector('#providers a')?.textContent === 'Sign in with Example'")
    stored = ContextFile(tmp_path / "contexts.json").read().get("there")
    headers = {"authorization": f"Bearer {stored.token}"}
    async with httpx.AsyncClient(timeout=SECONDS) as http:
        who = (await http.get(f"{company.people}/whoami", headers=headers)).json()
    assert (who["name"], len(who["roles"])) == ("account/cli-user", 1)
    assert stored.refresh_token


async def shows(page: Tab, expression: str) -> None:
    """Wait for something on whichever page is open by then."""
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                if await page.value(f"!!({expression})"):
                    return
            except AssertionError:
                pass  # the page that was asked has just been left
            await asyncio.sleep(0.05)
