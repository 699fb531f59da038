"""What a conversation of /v1/responses consists of, item after item, and the messages that templates read. Pure.

    items of the input ─▶ decode_items ─▶ messages_of ─▶ chat messages: what the assistant says at once is one of them
    items of an answer ─────────────────────────┘

An item without `type` is a message: OpenAI's easy form. What clients send back of an answer they got (ids, status,
annotations) is not looked at where it asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from services.frontend.protocol.chat import PARTS_LIMIT, ChatMessage
from services.frontend.protocol.chat_chunks import TokenLogprobs
from services.frontend.protocol.decoding import Harmless, NotBuilt, check_not_built, decode_body
from services.frontend.protocol.tools import TOOLS_LIMIT, Call, CalledFunction, ToolName, Unread, decoded_object
from shared.errors import InvalidRequest

ITEMS_LIMIT = 4096
"""Of one input."""

CallId = Annotated[str, Meta(min_length=1, max_length=128)]
Status = Literal["in_progress", "completed", "incomplete"]


_EMPTY = Harmless([], "")


class InputText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    """One part of a message."""

    text: str


class PastText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    """One part of what the assistant said, as it comes back."""

    text: str
    annotations: Unread | UnsetType = UNSET
    logprobs: Unread | UnsetType = UNSET
    parsed: Unread | UnsetType = UNSET
    """The text again, as OpenAI's client leaves it beside it."""


class InputMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A turn of the user, of the assistant, or instructions."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText | PastText], Meta(max_length=PARTS_LIMIT)]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Status | None = None
    phase: Annotated[NotBuilt, _EMPTY] = None


class PastCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: str
    """A JSON object, or nothing."""
    id: str | None = None
    status: Status | None = None
    parsed_arguments: Unread | UnsetType = UNSET
    """The same, as OpenAI's client leaves it beside them."""
    namespace: Annotated[NotBuilt, _EMPTY] = None
    caller: Annotated[NotBuilt, _EMPTY] = None


class CallOutput(Struct, frozen=True, forbid_unknown_fields=True):
    """What a tool answered."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: str | Annotated[list[InputText], Meta(max_length=PARTS_LIMIT)]
    id: str | None = None
    status: Status | None = None
    name: ToolName | None = None
    """Of the tool; templates that want it are told the call's, where this says none."""
    namespace: Annotated[NotBuilt, _EMPTY] = None
    caller: Annotated[NotBuilt, _EMPTY] = None


class ThoughtText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"):
    """Thinking, in the clear."""

    text: str


class PastThought(Struct, frozen=True, forbid_unknown_fields=True):
    """What the assistant thought; what is made of it, if anything, is the template's choice."""

    type: Literal["reasoning"]
    id: str | None = None
    content: Annotated[list[ThoughtText], Meta(max_length=PARTS_LIMIT)] | None = None
    status: Status | None = None
    summary: Annotated[NotBuilt, _EMPTY] = None
    encrypted_content: Annotated[NotBuilt, _EMPTY] = None


InputItem = InputMessage | PastCall | CallOutput | PastThought
INPUT_ITEMS: tuple[type[InputItem], ...] = get_args(InputItem)
AnyInputItem = Annotated[
    msgspec.Raw,
    Meta(extra_json_schema={"anyOf": [{"$ref": f"#/components/schemas/{one.__name__}"} for one in INPUT_ITEMS]}),
]
"""One of them that is not decoded yet: which it is, its `type` says, and none is a message."""


class _Kind(Struct, frozen=True):
    type: str | None = None


_KIND = msgspec.json.Decoder(_Kind)
_DECODERS: dict[str | None, msgspec.json.Decoder[InputItem]] = {
    None: msgspec.json.Decoder(InputMessage),
    "message": msgspec.json.Decoder(InputMessage),
    "function_call": msgspec.json.Decoder(PastCall),
    "function_call_output": msgspec.json.Decoder(CallOutput),
    "reasoning": msgspec.json.Decoder(PastThought),
}


def decode_items(given: str | Sequence[msgspec.Raw]) -> list[InputItem]:
    """The items of `input`; a text is a message of the user. Raises InvalidRequest, naming the field."""
    if isinstance(given, str):
        return [InputMessage("user", given)]
    return [_decode_item(bytes(raw), f"input[{at}]") for at, raw in enumerate(given)]


def _decode_item(raw: bytes, where: str) -> InputItem:
    try:
        kind = decode_body(_KIND, raw).type
        decoder = _DECODERS.get(kind)
        if decoder is None:
            wrong = f"type: items of type {str(kind)[:64]!r} are not supported"
            raise InvalidRequest(wrong, param="type", code="unsupported_parameter")
        item = decode_body(decoder, raw)
        check_not_built(item)
        if isinstance(item, PastCall):
            decoded_object(item.arguments or "{}", "arguments")
    except InvalidRequest as wrong:
        param, between = (f"{where}.{wrong.param}", ".") if wrong.param else (where, ": ")
        raise InvalidRequest(f"{where}{between}{wrong}", param=param, code=wrong.code) from None
    return item


# --- items of an answer


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """What the assistant says."""

    text: str
    annotations: list[None] = []
    logprobs: list[TokenLogprobs] = []


class OutputMessage(Struct, frozen=True, tag_field="type", tag="message"):
    """A message of the assistant, with one part once it has begun."""

    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"


class OutputThought(Struct, frozen=True, tag_field="type", tag="reasoning"):
    """What the model thinks before it answers."""

    id: str
    content: list[ThoughtText]
    status: Status
    summary: list[None] = []
    encrypted_content: None = None


class OutputCall(Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call of a tool."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


OutputItem = OutputThought | OutputMessage | OutputCall


# --- as chat messages


def messages_of(items: Iterable[InputItem | OutputItem]) -> list[ChatMessage]:
    """In order; what the assistant thought, said and called without anybody between is one message."""
    messages: list[ChatMessage] = []
    thoughts, said, calls = list[str](), None, list[Call]()

    def end_turn() -> None:
        nonlocal thoughts, said, calls
        thought = "".join(thoughts) or None
        if said is not None or calls or thought:
            messages.append(ChatMessage("assistant", said, tool_calls=calls or None, reasoning_content=thought))
        thoughts, said, calls = [], None, []

    for item in items:
        match item:
            case PastThought() | OutputThought():
                if said is not None or calls:
                    end_turn()
                thoughts += [part.text for part in item.content or ()]
            case OutputMessage() | InputMessage(role="assistant"):
                if said is not None or calls:
                    end_turn()
                said = _text(item.content)
            case PastCall() | OutputCall():
                if len(calls) == TOOLS_LIMIT:
                    end_turn()
                calls.append(Call(item.call_id, "function", CalledFunction(item.name, item.arguments)))
            case CallOutput():
                end_turn()
                messages.append(ChatMessage("tool", _text(item.output), item.name, tool_call_id=item.call_id))
            case InputMessage():
                end_turn()
                messages.append(ChatMessage(item.role, _text(item.content)))
    end_turn()
    return messages


def _text(content: str | Sequence[InputText | PastText | OutputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def check_calls(before: Iterable[ChatMessage], items: Sequence[InputItem]) -> None:
    """Each call has an id of its own, and each output a call before it, and is the only one. Raises InvalidRequest."""
    called = {call.id for message in before for call in message.tool_calls or ()}
    answered = {message.tool_call_id for message in before if message.tool_call_id is not None}
    for at, item in enumerate(items):
        if isinstance(item, PastCall):
            if item.call_id in called:
                raise _wrong_call(at, f"there are two calls {item.call_id!r}")
            called.add(item.call_id)
        elif isinstance(item, CallOutput):
            if item.call_id not in called:
                raise _wrong_call(at, f"no call {item.call_id!r} comes before this output")
            if item.call_id in answered:
                raise _wrong_call(at, f"there are two outputs of the call {item.call_id!r}")
            answered.add(item.call_id)


def _wrong_call(at: int, why: str) -> InvalidRequest:
    where = f"input[{at}].call_id"
    return InvalidRequest(f"{where}: {why}", param=where)
