"""The operations of the API, their HTTP paths, and the answers of /v1/models. Pure."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

from shared.messages.cards import SamplingDefaults

Operation = Literal[
    "chat",
    "completions",
    "embeddings",
    "responses",
    "retrieve_response",
    "delete_response",
    "tokenize",
    "detokenize",
    "pictures",
    "picture_edits",
    "videos",
    "list_videos",
    "retrieve_video",
    "delete_video",
    "cancel_video",
    "video_events",
]
"""An operation of the API. Over NATS it is the last token of the subject."""
PATHS: dict[Operation, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
    "pictures": "/v1/images/generations",
    "picture_edits": "/v1/images/edits",
    "videos": "/v1/videos",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
"""The HTTP path of each operation with a body; the method is POST."""
STORED_PATH = "/v1/responses/{response_id}"
STORED_METHODS: dict[Operation, str] = {"retrieve_response": "GET", "delete_response": "DELETE"}
"""The HTTP method of each operation at STORED_PATH. Its path and query hold what its body has over NATS."""
VIDEO_PATH = "/v1/videos/{video_id}"
VIDEO_METHODS: dict[Operation, tuple[str, str]] = {
    "list_videos": ("GET", "/v1/videos"),
    "retrieve_video": ("GET", VIDEO_PATH),
    "delete_video": ("DELETE", VIDEO_PATH),
    "cancel_video": ("POST", f"{VIDEO_PATH}/cancel"),
    "video_events": ("GET", f"{VIDEO_PATH}/events"),
}
"""The HTTP method and path of each operation on videos without a body, likewise."""
WITHOUT_BODY: frozenset[str] = frozenset((*STORED_METHODS, *VIDEO_METHODS))
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
ForeignOperation = Literal["messages", "count_tokens", "ollama_chat", "ollama_generate", "ollama_embed", "ollama_show"]
"""An operation in the form of another provider's API. It is there over HTTP only."""
FOREIGN_PATHS: dict[ForeignOperation, str] = {
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "ollama_chat": "/api/chat",
    "ollama_generate": "/api/generate",
    "ollama_embed": "/api/embed",
    "ollama_show": "/api/show",
}
"""The HTTP path of each of them; the method is POST."""


# --- /v1/models and /v1/models/{name}: OpenAI's fields, and vLLM's `max_model_len`


class ModelEntry(Struct, frozen=True):
    """A model that is served."""

    id: str
    created: int
    """Unix time in seconds when this process started."""
    max_model_len: int
    """Length of the context in tokens."""
    object: Literal["model"] = "model"
    owned_by: Literal["headrace"] = "headrace"
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    """The sampling parameters of requests that do not set them."""
    root: str = ""
    """What is served under the name: the name itself, or of a LoRA the id, which names its files."""
    parent: str | None = None
    """The name of the model that a LoRA changes. Null if it is no LoRA."""


class ModelList(Struct, frozen=True):
    """The models that are served."""

    data: list[ModelEntry]
    object: Literal["list"] = "list"
