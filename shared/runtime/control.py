"""The `control` subject of a process: whether it lives, how much it logs, and what it remembers."""

from __future__ import annotations

import asyncio
import logging

from shared import subjects
from shared.bus.contract import Message
from shared.errors import BusDown, PayloadTooLarge, ProtocolError, Unavailable
from shared.messages.control import (
    CONTROL,
    FOUND_NOTES,
    LOG_LEVEL_CHANGED,
    PONG,
    ChangeLogLevel,
    FindNotes,
    FoundNotes,
    LogLevelChanged,
    Note,
    Pong,
)
from shared.notes import block_name
from shared.runtime import logs
from shared.runtime.runtime import Runtime

FINDING_LIMIT = 8
"""Most questions for notes that are answered at once; more get no answer."""

_log = logging.getLogger(__name__)


async def answer_control(runtime: Runtime) -> None:
    """Answer each message on this process's `control` subject: Ping with a Pong, which has the epoch known to
    discovery, ChangeLogLevel with what became of it, and FindNotes with what this process remembers."""
    level = logs.LogLevel()
    finding = 0

    async def answer_notes(asked: FindNotes, message: Message) -> None:
        nonlocal finding
        finding += 1
        try:
            found = await _found_notes(runtime, asked)
            await runtime.bus.publish(
                message.reply, FOUND_NOTES.encode(found, message.headers), headers=message.headers
            )
        except (BusDown, PayloadTooLarge) as wrong:
            _log.warning("%s: no answer: %s", message.subject, wrong)
        finally:
            finding -= 1

    async def pong(message: Message) -> None:
        ping = CONTROL.decode(message.payload, message.headers)
        if isinstance(ping, FindNotes):
            if message.reply and finding < FINDING_LIMIT:  # in a task, because an engine may answer late
                runtime.tasks.create_task(answer_notes(ping, message), name="find notes")
            return
        if isinstance(ping, ChangeLogLevel):
            failed = level.change(ping.level, ping.for_s)
            if not failed:
                _log.warning("logs from level %s on%s", ping.level, f" for {ping.for_s:g} s" if ping.for_s else "")
            changed = LogLevelChanged(runtime.instance, failed)
            if message.reply:
                payload = LOG_LEVEL_CHANGED.encode(changed, message.headers)
                await runtime.bus.publish(message.reply, payload, headers=message.headers)
            return
        known = runtime.directory.instances.get(runtime.instance)
        publishes = runtime.discovery.publishes(ping.key) if ping.key else None
        answer = Pong(runtime.instance, 0 if known is None else known.epoch, runtime.health.progress, publishes)
        if message.reply:
            await runtime.bus.publish(message.reply, PONG.encode(answer, message.headers), headers=message.headers)

    await runtime.bus.subscribe(subjects.control(runtime.namespace, runtime.service, runtime.instance), pong)


async def _found_notes(runtime: Runtime, asked: FindNotes) -> FoundNotes:
    notes, places, failed = list[Note](), list[str](), ""
    try:
        if not asked.block:
            notes = runtime.notes.find_request(asked.request, asyncio.get_running_loop().time())
        elif runtime.notes.find_block is not None:
            places, notes = await runtime.notes.find_block(block_name(asked.block))
    except (Unavailable, ProtocolError) as wrong:
        failed = str(wrong)
    return FoundNotes(runtime.service, runtime.instance, notes, places, failed)
