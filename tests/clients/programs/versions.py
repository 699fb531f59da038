"""Prints the versions of the clients that tests run, one a line."""

from __future__ import annotations

from importlib.metadata import version

CLIENTS = (
    "anthropic",
    "instructor",
    "langchain-openai",
    "litellm",
    "llm",
    "ollama",
    "openai",
    "openai-agents",
    "outlines",
    "pydantic-ai-slim",
    "schemathesis",
)
for name in CLIENTS:
    print(name, version(name))
