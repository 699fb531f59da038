"""Which requests for the page come from the page itself, or from no browser. Pure.

A browser says where a request comes from: `Sec-Fetch-Site` (Fetch Metadata, W3C) and `Origin`. A page of another site
may link to /ui, and get nothing else.

A hostile site can give a name of its own the address of this machine (DNS rebinding). Its page then is of the same
origin as the API, with that name in `Host`. Where no key is needed, `Host` must therefore be an address, localhost, or
a name that the settings list.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

_ADDRESS = re.compile(r"\[[0-9a-fA-F:.]{2,45}\]|[0-9]{1,3}(\.[0-9]{1,3}){3}")


def refusal(headers: Mapping[str, str], hosts: Collection[str], *, keys: bool, is_document: bool) -> str:
    """Return why a request is refused; empty: it is not. `keys`: whether the API needs one; `is_document`: whether /ui
    itself is asked for, to which any page may link."""
    host = headers.get("Host", "").lower()
    name = _name(host)
    if not keys and name and not _is_own(name) and name not in hosts:
        return f"Host: {_shown(name)} is neither an address nor localhost, and ui.hosts does not list it"
    linked = is_document and headers.get("Sec-Fetch-Mode", "navigate") == "navigate"
    embedded = headers.get("Sec-Fetch-Dest", "document") != "document"
    site = headers.get("Sec-Fetch-Site", "none")
    if site not in ("same-origin", "none") and (not linked or embedded):
        return f"Sec-Fetch-Site: {_shown(site)}: pages of other origins get nothing of /ui"
    origin = headers.get("Origin", "").lower()
    if origin and _host_of(origin) != host and _name(_host_of(origin)) not in hosts:
        return f"Origin: {_shown(origin)} is not this host: pages of other origins get nothing of /ui"
    return ""


def _host_of(origin: str) -> str:
    """Return host and port of an origin; a line break for one that has none, since no header has that."""
    try:
        return urlsplit(origin).netloc or "\n"
    except ValueError:
        return "\n"


def _name(host: str) -> str:
    """Return a Host header without its port."""
    return re.sub(r":[0-9]*$", "", host)


def _is_own(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost") or _ADDRESS.fullmatch(name) is not None


def _shown(text: str) -> str:
    """Return a text of a client for an error: a short one."""
    return ascii(text[:80])
