"""Creates the users of etcd and enables authentication: `etcd_users.py URL`.

root      may do everything; its password is ETCD_ROOT_PASSWORD
services  may read and write keys that begin with PREFIX; its password is SERVICES_PASSWORD

Every step may have been done before, so the script can be repeated after a failure. If `services` can log in, it does
nothing. It runs with `-I -S` over etcd's JSON gateway, as etcd's image has no shell and ours no etcdctl.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import urllib.error
import urllib.request

PREFIX = "/headrace/"
PAST_PREFIX = "/headrace0"
"""The first key after all keys that begin with PREFIX."""
TIMEOUT_S = 10.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""An opener without proxies. Docker gives containers the proxies of its client; they must not get a password."""


class EtcdError(Exception):
    """A request that etcd refused, with its message."""


class Etcd:
    """A client of etcd's authentication API, with a token after `login`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._token = ""

    def ask(self, path: str, **body: object) -> dict[str, object]:
        """Send a request and return the answer. Raises EtcdError, and OSError if etcd does not answer."""
        headers = {"Authorization": self._token} if self._token else {}
        request = urllib.request.Request(f"{self._url}/v3/auth/{path}", json.dumps(body).encode(), headers)  # noqa: S310 etcd's
        try:
            with DIRECT.open(request, timeout=TIMEOUT_S) as answer:
                answered: dict[str, object] = json.load(answer)
                return answered
        except urllib.error.HTTPError as refused:
            text = refused.read(10_000).decode(errors="replace")
            try:
                raise EtcdError(str(json.loads(text)["error"])) from None
            except (ValueError, KeyError, TypeError):
                raise EtcdError(text or str(refused)) from None

    def create(self, path: str, **body: object) -> bool:
        """Create a user or role. Return False if it existed before. Raises EtcdError."""
        try:
            self.ask(path, **body)
        except EtcdError as refused:
            if "already exist" in str(refused):
                return False
            raise
        return True

    def login(self, user: str, password: str) -> None:
        """Send later requests as this user. Raises EtcdError."""
        self._token = str(self.ask("authenticate", name=user, password=password)["token"])

    def ensure_user(self, name: str, password: str, role: str) -> None:
        """Create the user or change its password, and grant it the role."""
        if not self.create("user/add", name=name, password=password):
            self.ask("user/changepw", name=name, password=password)
        self.ask("user/grant", user=name, role=role)


def ensure_users(etcd: Etcd, root_password: str, services_password: str) -> str:
    """Create users and role and enable authentication. Return a sentence that says what was done. Raises EtcdError."""
    enabled = True
    try:
        etcd.login("services", services_password)
    except EtcdError as refused:
        enabled = "authentication is not enabled" not in str(refused)
    else:
        return "etcd has its users already"
    if enabled:
        etcd.login("root", root_password)
    else:
        etcd.ensure_user("root", root_password, "root")
    etcd.create("role/add", name="headrace")
    span = {"key": _encoded(PREFIX), "range_end": _encoded(PAST_PREFIX)}
    etcd.ask("role/grant", name="headrace", perm={"permType": "READWRITE", **span})
    etcd.ensure_user("services", services_password, "headrace")
    if not enabled:
        etcd.ask("enable")
    return "etcd has its users and requires authentication now"


def _encoded(key: str) -> str:
    return base64.b64encode(key.encode()).decode()


def main() -> int:
    """Print to stdout what was done or what is wrong; return the exit status."""
    try:
        print(ensure_users(Etcd(sys.argv[1]), os.environ["ETCD_ROOT_PASSWORD"], os.environ["SERVICES_PASSWORD"]))
    except EtcdError as refused:
        print(f"etcd: {refused}; if ETCD_ROOT_PASSWORD was changed: docker compose down, then remove etcd's volume")
        return 1
    except OSError as wrong:
        print(f"etcd does not answer at {sys.argv[1]}: {wrong}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
