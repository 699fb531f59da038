"""The files of the page, read once at the start, and the headers that keep it to itself.

    /ui                 index.html
    /ui/page.css, …     the other files of the folder `page`, by name

The Content-Security-Policy allows scripts, styles and connections of the same origin alone: no inline script or style,
no other host, no frame around it. Trusted Types forbid that a text becomes markup.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from msgspec import Struct

PATH = "/ui"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""The headers of every answer below /ui."""
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class PageFile(Struct, frozen=True):
    """The content of one file, and its type."""

    content: bytes
    content_type: str


def page_files() -> dict[str, PageFile]:
    """Return the files of the page by their path."""
    found: dict[str, PageFile] = {}
    for each in files("services.frontend.ui").joinpath("page").iterdir():
        kind = _TYPES.get(each.name[each.name.rfind(".") :])
        if kind is not None:
            path = PATH if each.name == "index.html" else f"{PATH}/{each.name}"
            found[path] = PageFile(each.read_bytes(), kind)
    assert PATH in found, "the package lacks its page"
    return found
