"""The operations that clients may ask for, and their HTTP paths. Pure."""

from __future__ import annotations

from typing import Literal, get_args

Operation = Literal[
    "chat", "completions", "embeddings", "responses", "retrieve_response", "delete_response", "tokenize", "detokenize"
]
"""What a body asks for. Over NATS it is the last word of the subject."""
PATHS: dict[Operation, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
"""Where it is asked over HTTP, with POST."""
STORED_PATH = "/v1/responses/{response_id}"
STORED_METHODS: dict[Operation, str] = {"retrieve_response": "GET", "delete_response": "DELETE"}
"""What is asked there, and with which method: what the path and the query say is the body that it has over NATS."""
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
