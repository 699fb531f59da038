"""gRPC's health protocol at the picker's port: `Check` answers once, `Watch` at once and whenever the status changes.

A watch ends when its client goes or this process does; its last word then is NOT_SERVING.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from services.frontend.picker.wire import MESSAGES

LIVENESS = "liveness"
READINESS = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
WATCHES = 64
"""The most watches that are open at once; one more ends with RESOURCE_EXHAUSTED."""
NAME_CHARACTERS = 64
"""The most characters of a service's name."""
LOOK_S = 0.5
"""Seconds between two looks at whether a status has changed."""
READ_S = 30.0
"""Seconds that the client of a watch may leave a status unread."""
_ASKED, _ANSWER = MESSAGES["HealthCheckRequest"], MESSAGES["HealthCheckResponse"]


class GatewayHealth:
    """Answers about the services of one port."""

    def __init__(self, faults: Callable[[], Sequence[str]]) -> None:
        """`faults` returns why no endpoint would be chosen; empty if one would."""
        self._faults = faults
        self._ending = asyncio.Event()
        self.watches = 0
        """The number of watches that are open."""

    def handler(self) -> Any:
        """Return what a gRPC server needs to answer."""
        codec = {"request_deserializer": _ASKED.FromString, "response_serializer": _ANSWER.SerializeToString}
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, **codec),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **codec),
        }
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", methods)

    def end(self) -> None:
        """End all watches, each with NOT_SERVING."""
        self._ending.set()

    def _status(self, service: str) -> int:
        if service not in (LIVENESS, *READINESS):
            return SERVICE_UNKNOWN
        return SERVING if service == LIVENESS or not self._faults() else NOT_SERVING

    async def _check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:NAME_CHARACTERS]!r}")
        return _ANSWER(status=status)

    async def _watch(self, request: Any, context: Any) -> None:
        if len(request.service) > NAME_CHARACTERS:
            most = f"a service's name has at most {NAME_CHARACTERS} characters"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, most)
        if self.watches >= WATCHES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{WATCHES} watches are open, no more are taken")
        self.watches += 1
        try:
            with suppress(TimeoutError):  # its client does not read
                await self._say_changes(request.service, context)
        finally:
            self.watches -= 1

    async def _say_changes(self, service: str, context: Any) -> None:
        said = 0
        while True:
            ending = self._ending.is_set()
            status = NOT_SERVING if ending else self._status(service)
            if status != said:
                async with asyncio.timeout(READ_S):
                    await context.write(_ANSWER(status=status))
                said = status
            if ending:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._ending.wait()
