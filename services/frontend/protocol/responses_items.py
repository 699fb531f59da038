"""The items of a conversation of /v1/responses, and the chat messages that they become. Pure.

    items of the input ─▶ decode_items ─▶ messages_of ─▶ chat messages; each turn of the assistant becomes one message
    items of an answer ─────────────────────────┘
    references to items ─▶ items_by_id ─▶ decode_referenced ─▶ as items of the input

An item without `type` is a message: OpenAI's easy form. With an `id`, and neither role nor content, it is a reference.
Fields of an answer that clients send back (ids, status, annotations) are ignored if they ask for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from services.frontend.protocol.chat import PARTS_LIMIT, ChatMessage
from services.frontend.protocol.chat_chunks import TokenLogprobs
from services.frontend.protocol.decoding import Harmless, NotBuilt, check_not_built, decode_body, not_supported
from services.frontend.protocol.errors import UNSUPPORTED, field_error
from services.frontend.protocol.foreign import Hint
from services.frontend.protocol.ignored_fields import REFUSE, Advisory, IgnoredFields
from services.frontend.protocol.responses_tools import chat_name
from services.frontend.protocol.tools import TOOLS_LIMIT, Call, CalledFunction, ToolName, Unread, decoded_object

ITEMS_LIMIT = 4096
"""Items of one input."""

CallId = Annotated[str, Meta(min_length=1, max_length=128)]
Status = Literal["in_progress", "completed", "incomplete"]


_EMPTY = Harmless([], "")
Caller = Annotated[Hint, Harmless(msgspec.Raw(b'""'), msgspec.Raw(b'{"type":"direct"}'))]
"""Whether a program made the call; programs cannot call tools here."""


class InputText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    """A text in a message."""

    text: str


class PastText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    """A text in an assistant's message that the client sends back."""

    text: str
    annotations: Unread | UnsetType = UNSET
    logprobs: Unread | UnsetType = UNSET
    parsed: Unread | UnsetType = UNSET
    """The text in parsed form, which OpenAI's client adds."""


class InputMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A message of the user or the assistant, or instructions."""

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
    """A JSON object as a text, or an empty text."""
    id: str | None = None
    status: Status | None = None
    parsed_arguments: Unread | UnsetType = UNSET
    """The arguments in parsed form, which OpenAI's client adds."""
    namespace: Annotated[str, Meta(max_length=256)] | None = None
    caller: Caller = UNSET


class CallOutput(Struct, frozen=True, forbid_unknown_fields=True):
    """The output of a tool's call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: str | Annotated[list[InputText], Meta(max_length=PARTS_LIMIT)]
    id: str | None = None
    status: Status | None = None
    name: ToolName | None = None
    """The tool's name; without it, chat templates that need one get the name in the call."""
    namespace: Annotated[str, Meta(max_length=256)] | None = None
    caller: Caller = UNSET


class ThoughtText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"):
    """A text of reasoning, not encrypted."""

    text: str


class SummaryText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="summary_text"):
    """A text of a summary of reasoning; in answers it is the whole reasoning."""

    text: str


class PastThought(Struct, frozen=True, forbid_unknown_fields=True):
    """Reasoning of the assistant that the client sends back; the chat template decides whether to render it."""

    type: Literal["reasoning"]
    id: str | None = None
    content: Annotated[list[ThoughtText], Meta(max_length=PARTS_LIMIT)] | None = None
    status: Status | None = None
    summary: Annotated[list[SummaryText], Meta(max_length=PARTS_LIMIT)] | None = None
    """The reasoning, unless there is content; next to content it is ignored."""
    encrypted_content: Annotated[str | None, Advisory(), _EMPTY] = None
    """Reasoning of a server that encrypts it; it cannot be read here."""


class ItemReference(Struct, frozen=True, forbid_unknown_fields=True):
    """An item of a stored response. The service replaces it by the item before anything else reads it."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    type: Literal["item_reference"] | None = None


InputItem = InputMessage | PastCall | CallOutput | PastThought | ItemReference
INPUT_ITEMS: tuple[type[InputItem], ...] = get_args(InputItem)
AnyInputItem = Annotated[
    msgspec.Raw,
    Meta(extra_json_schema={"anyOf": [{"$ref": f"#/components/schemas/{one.__name__}"} for one in INPUT_ITEMS]}),
]
"""An item that is not decoded yet. Its `type` says which it is; without one it is a message, or a reference if it has
an `id`, no role and no content."""


class _Kind(Struct, frozen=True):
    type: str | None = None
    id: Unread | UnsetType = UNSET
    role: Unread | UnsetType = UNSET
    content: Unread | UnsetType = UNSET

    @property
    def name(self) -> str | None:
        """The item's type; None for a message that does not say it."""
        if self.type is None and self.id is not UNSET and self.role is UNSET and self.content is UNSET:
            return "item_reference"
        return self.type


_KIND = msgspec.json.Decoder(_Kind)
_DECODERS: dict[str | None, msgspec.json.Decoder[InputItem]] = {
    None: msgspec.json.Decoder(InputMessage),
    "message": msgspec.json.Decoder(InputMessage),
    "function_call": msgspec.json.Decoder(PastCall),
    "function_call_output": msgspec.json.Decoder(CallOutput),
    "reasoning": msgspec.json.Decoder(PastThought),
    "item_reference": msgspec.json.Decoder(ItemReference),
}


def decode_items(given: str | Sequence[msgspec.Raw], ignored: IgnoredFields = REFUSE) -> list[InputItem]:
    """Decode the items of `input`; a text is a message of the user. Raise InvalidRequest, naming the field."""
    if isinstance(given, str):
        return [InputMessage("user", given)]
    return [_decode_item(bytes(raw), f"input[{at}]", ignored) for at, raw in enumerate(given)]


def _decode_item(raw: bytes, where: str, ignored: IgnoredFields) -> InputItem:
    kind = decode_body(_KIND, raw, where=where).name
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise field_error(f"{where}.type", f"items of type {str(kind)[:64]!r} are not supported", UNSUPPORTED)
    item = decode_body(decoder, raw, ignored, where)
    check_not_built(item, f"{where}.", ignored)
    if isinstance(item, PastCall):
        decoded_object(item.arguments or "{}", f"{where}.arguments")
    if isinstance(item, PastThought) and item.content and item.summary:
        if ignored.refuse:
            raise not_supported(f"{where}.summary")
        ignored.add("input[].summary")
    return item


class _ItemId(Struct, frozen=True):
    id: str


class _Items(Struct, frozen=True):
    output: list[msgspec.Raw]


_ITEM_ID = msgspec.json.Decoder(_ItemId)
_ITEMS = msgspec.json.Decoder(_Items)


def items_by_id(response: bytes) -> dict[str, bytes]:
    """Return the items of a response in JSON, by their ids. Raise msgspec.MsgspecError."""
    return {_ITEM_ID.decode(raw).id: bytes(raw) for raw in _ITEMS.decode(response).output}


def decode_referenced(raw: bytes, at: int) -> InputItem:
    """Decode an item of an answer, to which `input[at]` refers, as if the client had sent it back. Raise
    InvalidRequest."""
    return _decode_item(raw, f"input[{at}]", IgnoredFields())


# --- items of an answer


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """The text of an assistant's message."""

    text: str
    annotations: list[None] = []
    logprobs: list[TokenLogprobs] = []


class OutputMessage(Struct, frozen=True, tag_field="type", tag="message"):
    """A message of the assistant. It has one part once it has begun, none before."""

    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"


class OutputThought(Struct, frozen=True, tag_field="type", tag="reasoning"):
    """The model's reasoning before its answer."""

    id: str
    content: list[ThoughtText]
    status: Status
    summary: list[SummaryText] = []
    """The reasoning in place of content, if the request asks for a summary."""
    encrypted_content: None = None


class OutputCall(Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call of a tool."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status
    namespace: str | UnsetType = UNSET


OutputItem = OutputThought | OutputMessage | OutputCall


# --- as chat messages


def messages_of(
    items: Iterable[InputItem | OutputItem], chat_names: Mapping[tuple[str, str], str] = {}
) -> list[ChatMessage]:
    """Turn items into chat messages, in order. Neighbouring reasoning, text and calls of the assistant are one
    message. `chat_names`: for each namespace and name of a tool, its name in a chat."""
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
                thoughts += [part.text for part in item.content or item.summary or ()]
            case OutputMessage() | InputMessage(role="assistant"):
                if said is not None or calls:
                    end_turn()
                said = _text(item.content)
            case PastCall() | OutputCall():
                if len(calls) == TOOLS_LIMIT:
                    end_turn()
                space, name = item.namespace or "", item.name
                if space:
                    name = chat_names.get((space, name)) or chat_name(space, name)
                calls.append(Call(item.call_id, "function", CalledFunction(name, item.arguments)))
            case CallOutput():
                end_turn()
                messages.append(ChatMessage("tool", _text(item.output), item.name, tool_call_id=item.call_id))
            case InputMessage():
                end_turn()
                messages.append(ChatMessage(item.role, _text(item.content)))
            case ItemReference():
                raise AssertionError("references are replaced before")
    end_turn()
    return messages


def _text(content: str | Sequence[InputText | PastText | OutputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def check_calls(before: Iterable[ChatMessage], items: Sequence[InputItem]) -> None:
    """Check that each call has an id of its own, and that each output is the only one of a call before it.

    Raise InvalidRequest."""
    called = {call.id for message in before for call in message.tool_calls or ()}
    answered = {message.tool_call_id for message in before if message.tool_call_id is not None}
    for at, item in enumerate(items):
        where = f"input[{at}].call_id"
        if isinstance(item, PastCall):
            if item.call_id in called:
                raise field_error(where, f"there are two calls with the id {item.call_id!r}")
            called.add(item.call_id)
        elif isinstance(item, CallOutput):
            if item.call_id not in called:
                raise field_error(where, f"no call {item.call_id!r} comes before this output")
            if item.call_id in answered:
                raise field_error(where, f"there are two outputs of the call {item.call_id!r}")
            answered.add(item.call_id)
