"""Prints the versions of the clients that tests run, one a line."""

from __future__ import annotations

from importlib.metadata import version

CLIENTS = (
    "anthropic",
    "dspy",
    "instructor",
    "langchain-openai",
    "litellm",
    "llama-index-llms-openai-like",
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
