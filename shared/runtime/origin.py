"""Which requests come from a page that may ask, or from no browser. Pure.

A browser says where a request comes from: `Sec-Fetch-Site` (Fetch Metadata, W3C) and `Origin`. A page of another site
may link here, and get nothing else, unless a setting lists its origin. Programs send neither header, or, as extensions
of browsers and desktop apps do, an `Origin` of a scheme that no page can have.

A hostile site can give a name of its own the address of this machine (DNS rebinding). Its page then is of the same
origin as the listener, with that name in `Host`. Where no key is needed, `Host` must therefore be an address, a name
that no site can have, or one that the settings list. A site's name has a dot, and does not end in `localhost` or
`internal`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from msgspec import Struct

ANY_ORIGIN = "*"
_PORT = re.compile(r":[0-9]*$")
_ADDRESS = re.compile(r"\[[0-9a-fA-F:.]{2,45}\]|[0-9]{1,3}(\.[0-9]{1,3}){3}")
_OWN_DOMAINS = (".localhost", ".internal")
"""Ends of names that no site can have; Docker's name for its host is host.docker.internal."""
_PROGRAM = re.compile(r"(?!https?:|file:)[a-z][a-z0-9+.-]*://[^/]+")
"""An `Origin` that no page can have, such as app://x."""


class OriginRule(Struct, frozen=True):
    """The rule of one listener."""

    table: str
    """The table of the settings that has `hosts`; errors name it."""
    hosts: frozenset[str] = frozenset()
    """Further names of this listener, in lower case."""
    any_host: bool = False
    """Whether `Host` may be any name."""
    origins: frozenset[str] | None = None
    """Origins whose pages may ask, in addition to the listener's own; `*`: any. None if there is no setting for
    them."""

    def refusal(self, headers: Mapping[str, str], *, linkable: bool = False) -> str:
        """Return why a request is refused; empty if it is not. `linkable`: whether any page may link to what is asked
        for."""
        origins = self.origins or ()
        if ANY_ORIGIN in origins:
            return ""
        host = headers.get("Host", "").lower()
        name = _name(host)
        if not (self.any_host or _is_own(name) or name in self.hosts):
            return f"Host: {_shown(name)} is neither an address nor localhost, and {self.table}.hosts does not list it"
        origin, site = headers.get("Origin", "").lower(), headers.get("Sec-Fetch-Site", "none")
        if (not origin and site == "none") or origin in origins or _PROGRAM.fullmatch(origin):
            return ""
        linked = linkable and headers.get("Sec-Fetch-Mode", "navigate") == "navigate"
        embedded = headers.get("Sec-Fetch-Dest", "document") != "document"
        get_nothing = "pages of other origins get nothing here"
        if self.origins is not None:
            get_nothing += f", unless {self.table}.cors_origins lists them"
        if site not in ("same-origin", "none") and (not linked or embedded):
            return f"Sec-Fetch-Site: {_shown(site)}: {get_nothing}"
        if origin and _host_of(origin) != host and _name(_host_of(origin)) not in self.hosts:
            return f"Origin: {_shown(origin)} is not this host: {get_nothing}"
        return ""


def rule_of(table: str, host: str, hosts: Collection[str], origins: Collection[str] | None = None) -> OriginRule:
    """Return the rule of a listener bound to `host`. One that others can reach may have any name, unless its names are
    listed."""
    names = frozenset(name.lower() for name in hosts)
    allowed = None if origins is None else frozenset(origin.lower() for origin in origins)
    return OriginRule(table, names, any_host=not (_is_loopback(host) or names), origins=allowed)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_of(origin: str) -> str:
    """Return host and port of an origin; a line break for one that has none, since no header has that."""
    try:
        return urlsplit(origin).netloc or "\n"
    except ValueError:
        return "\n"


def _name(host: str) -> str:
    """Return a Host header without its port."""
    return _PORT.sub("", host)


def _is_own(name: str) -> bool:
    """Return whether no site can have this name."""
    return "." not in name or name.endswith(_OWN_DOMAINS) or _ADDRESS.fullmatch(name) is not None


def _shown(text: str) -> str:
    """Return a text of a client for an error: a short one."""
    return ascii(text[:80])
