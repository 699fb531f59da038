"""The names of requests: how an id that people have finds the ids that services use. Pure.

chatcmpl-  my-trial - f63647dd…  / 2
kind       client's   frontend's   number of a choice, where a request has several
           own part   own part
"""

from __future__ import annotations

NAME_DIGITS = 12
"""Fewest digits of the frontend's own part of an id that name a request, and as many as are shown to people who may not
have the whole id: with it one could read a stored response."""
_KINDS = ("chatcmpl-", "cmpl-", "embd-", "msg_")


def bare_id(name: str) -> str:
    """Return a request's id from what a user gives, which may be an answer's `id`."""
    request = name.strip('" \t\r\n')
    if request.startswith("resp_"):  # before the point is the frontend that keeps the response
        return request.partition(".")[2] or request
    for kind in _KINDS:
        request = request.removeprefix(kind) or request
    return request


def is_named(request: str, name: str) -> bool:
    """Return whether the request with the id `request` is meant by `name`: the id, without or with the number of a
    choice; the client's own part; or the beginning of the frontend's part, of NAME_DIGITS or more. An empty name means
    every request."""
    if name in ("", request):
        return True
    whole = request.partition("/")[0]
    clients, _, own = whole.rpartition("-")
    return name in (whole, clients) or (len(name) >= NAME_DIGITS and own.startswith(name))


def short_name(request: str) -> str:
    """Return the name of a request that people may see."""
    return request.partition("/")[0].rpartition("-")[2][:NAME_DIGITS]
