"""The messages of a chat, and the form in which chat templates read them. Pure.

    messages of a body ─▶ check_message ─▶ messages_as_rendered ─▶ models/message_list.py: as the template takes them

A message of the assistant may be an answer of any server, whole, cut off or empty: what this server answered can always
be sent back. Arguments of calls are any text, ids may be missing or repeated, names are those of other tools.

`developer` messages are rendered as `system`, since the templates of open models do not know the newer role.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from services.frontend.protocol.decoding import check_not_built, not_supported, part_not_served
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.ignored_fields import REFUSE, Advisory, IgnoredFields
from services.frontend.protocol.parts import (
    ImagePart,
    ImageSource,
    ResultContent,
    Unread,
    detail_of,
    image_of,
    not_of_user,
    text_of_content,
    thinking_of_content,
    unseen_parts,
)
from services.frontend.protocol.tools import TOOLS_LIMIT

MESSAGES_LIMIT = 4096
CALLS_LIMIT = 4096
"""Calls in all messages together. Those that are no JSON take 0.1 s of the event loop."""

CallId = Annotated[str, Meta(max_length=16 << 10)]
"""The id of a call. LiteLLM's have Gemini's signature of a thought in them."""
CalledName = Annotated[str, Meta(max_length=256)]
"""The name of a tool that was called. Other servers allow more than OpenAI does, and lose it when a stream breaks."""


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The function that the model called, with its arguments."""

    name: CalledName
    arguments: str | dict[str, Any] | None = ""
    """A JSON object as a text; any other text if the model wrote that. Some servers send the object itself."""
    parsed_arguments: Unread | UnsetType = UNSET
    """The arguments in parsed form, which OpenAI's client adds."""


class CalledCustom(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The custom tool that the model called, with its input."""

    name: CalledName
    input: str


class Call(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of an assistant message's `tool_calls`."""

    id: CallId | None = None
    type: Literal["function", "custom", ""] | None = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    index: int | None = None
    """The call's place in the message; clients that assemble a message from chunks leave it there."""

    @property
    def called(self) -> CalledFunction:
        """The call as one of a function: a custom tool's input is the argument `input`."""
        if self.function is not None:
            return self.function
        assert self.custom is not None, "check_message refuses a call of nothing"
        return CalledFunction(self.custom.name, {"input": self.custom.input})


Calls = Annotated[list[Call], Meta(max_length=TOOLS_LIMIT)]


class PastAudio(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The sound of an answer. Its transcript is the text of the message."""

    transcript: str | None = None
    id: Unread | UnsetType = UNSET
    data: Unread | UnsetType = UNSET
    expires_at: Unread | UnsetType = UNSET


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One message of the conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    """OpenAI's roles have rules here; others are left to the chat template."""
    content: ResultContent | None = None
    name: str | None = None
    tool_calls: Calls | None = None
    """The calls that an assistant's message makes."""
    reasoning_content: str | None = None
    """The reasoning of an assistant's message; the chat template decides whether to render it."""
    tool_call_id: CallId | None = None
    """The id of the call that a tool's message answers. Without it, the message answers the first call without one."""
    parsed: Unread | UnsetType = UNSET
    """The content in parsed form, which OpenAI's client adds to an assistant's message."""
    provider_specific_fields: Unread | UnsetType = UNSET
    """What LiteLLM adds to an assistant's message."""
    # of other servers' answers
    reasoning: str | None = None
    """What newer versions of vLLM, and OpenRouter, call `reasoning_content`."""
    refusal: str | None = None
    """What an assistant said in place of an answer; it is part of the message's text."""
    annotations: Unread | UnsetType = UNSET
    audio: Annotated[PastAudio | None, Advisory()] = None
    function_call: CalledFunction | None = None
    """The one call of an assistant's message, as OpenAI's API had it before `tool_calls`."""


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_LIMIT)]

_OF_ASSISTANT = ("tool_calls", "reasoning_content", "reasoning", "refusal", "function_call")
_ROLE_OF_FIELD = {**dict.fromkeys(_OF_ASSISTANT, "assistant"), "tool_call_id": "tool"}
"""The fields that only messages of one role may have."""
_RENDERED_ROLES = {"developer": "system", "function": "tool"}


def check_message(message: ChatMessage, where: str, ignored: IgnoredFields = REFUSE) -> None:
    """Check what the type of a message does not; `where` is its place in the body. Raise InvalidRequest."""
    check_not_built(message, f"{where}.", ignored)
    for field, role in _ROLE_OF_FIELD.items():
        if getattr(message, field) and message.role != role:
            raise field_error(f"{where}.{field}", f"only role {role} may have it")
    for at, call in enumerate(message.tool_calls or ()):
        if call.function is None and call.custom is None:
            raise field_error(f"{where}.tool_calls[{at}].function", "the call names no function")
    for at, part in unseen_parts(message.content):
        kind = str(part.__struct_config__.tag)
        if message.role == "user" and isinstance(part, ImagePart):
            image_of(part, f"{where}.content[{at}]")
            if detail_of(part) not in ("", "auto"):
                field = f"{where}.content[].{kind}.detail"
                ignored.add_or_raise(field, not_supported(f"{where}.content[{at}].detail"))
            continue
        if message.role == "tool":
            ignored.add_or_raise(f"{where}.content[].{kind}", part_not_served(f"{where}.content[{at}].type", kind))
        elif isinstance(part, ImagePart):
            raise not_of_user(f"{where}.content[{at}].type", message.role)
        else:
            raise part_not_served(f"{where}.content[{at}].type", kind)
    if message.content is None and message.role in ("system", "developer", "user"):
        raise field_error(f"{where}.content", "the message has no content")


def text_of(message: ChatMessage) -> str:
    """Return the text of a message; empty if it has none."""
    text = text_of_content(message.content, message.role)
    said = text or (message.audio.transcript if message.audio is not None else None) or ""
    return "\n".join(filter(None, (said, message.refusal)))


def image_parts(messages: Sequence[ChatMessage]) -> Iterator[tuple[str, ImagePart]]:
    """Yield the images that users show, in order, each after its place in the body."""
    for at, message in enumerate(messages):
        for place, part in unseen_parts(message.content if message.role == "user" else None):
            if isinstance(part, ImagePart):
                yield f"messages[{at}].content[{place}]", part


def images_of(messages: Sequence[ChatMessage]) -> list[ImageSource]:
    """Return the images that users show, in order. Raise InvalidRequest for one that is nowhere."""
    return [image_of(part, where) for where, part in image_parts(messages)]


def messages_as_rendered(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages in the form that chat templates read, with the arguments of calls as texts. Raise
    InvalidRequest for a result that belongs to no call, and if there are more than CALLS_LIMIT calls."""
    names: dict[str, str] = {}
    """The ids of calls → the names of their tools."""
    waiting = _Waiting()
    left = CALLS_LIMIT
    rendered: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        turn = _turn(message)
        if turn["role"] == "tool":
            call = message.tool_call_id or waiting.first(message.name)
            if call is None:
                why = "the message names no call, and no call without a result is before it"
                raise field_error(f"messages[{at}].tool_call_id", why)
            turn["tool_call_id"] = call
            waiting.remove(call)
            if call in names:  # some templates need it
                turn.setdefault("name", names[call])
        calls = list(message.tool_calls or ())
        if message.function_call is not None:
            calls.append(Call(function=message.function_call))
        left -= len(calls)
        if left < 0:
            raise field_error(f"messages[{at}].tool_calls", f"more than {CALLS_LIMIT} calls in all messages")
        for number, one in enumerate(calls):
            name = one.id or f"c{at:05}{number:03}"  # nine letters and digits: Mistral's templates accept no other
            names[name] = one.called.name
            waiting.add(name, one.called.name)
            function = {"name": one.called.name, "arguments": _written(one.called.arguments)}
            turn.setdefault("tool_calls", []).append({"id": name, "type": "function", "function": function})
        rendered.append(turn)
    return rendered


class _Waiting:
    """The calls without a result, oldest first."""

    def __init__(self) -> None:
        self._tools: dict[str, str] = {}
        """The id of each → the name of its tool."""
        self._of_tool: dict[str, dict[str, None]] = {}

    def add(self, call: str, tool: str) -> None:
        """Add a call, which may have the id of a former one."""
        former = self._tools.get(call, tool)
        if former != tool:
            del self._of_tool[former][call]
        self._tools[call] = tool
        self._of_tool.setdefault(tool, {})[call] = None

    def remove(self, call: str) -> None:
        """Remove a call, if it is there."""
        if (tool := self._tools.pop(call, None)) is not None:
            del self._of_tool[tool][call]

    def first(self, tool: str | None) -> str | None:
        """Return the id of the oldest call that a result without an id may belong to; None if there is none. `tool`:
        the tool's name. None if it is not known."""
        return next(iter(self._tools if tool is None else self._of_tool.get(tool, ())), None)


def _written(arguments: str | dict[str, Any] | None) -> str:
    return msgspec.json.encode(arguments).decode() if isinstance(arguments, dict) else arguments or ""


def _content(message: ChatMessage) -> str | list[dict[str, str]]:
    """Return the content of a message: a text, or parts if a user shows images."""
    parts = message.content if message.role == "user" and isinstance(message.content, list) else ()
    if not any(isinstance(part, ImagePart) for part in parts):
        return text_of(message)
    return [
        {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": text_of_content([part], "user")}
        for part in parts
    ]


def _turn(message: ChatMessage) -> dict[str, Any]:
    turn = {
        "role": _RENDERED_ROLES.get(message.role, message.role),
        "content": _content(message),
        "name": message.name,
        "reasoning_content": message.reasoning_content or message.reasoning or thinking_of_content(message.content),
    }
    return {field: value for field, value in turn.items() if value or field == "content"}
