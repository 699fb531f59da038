"""Prints the versions of the clients that tests run, one a line."""

from __future__ import annotations

from importlib.metadata import version

for name in ("anthropic", "langchain-openai", "litellm", "ollama", "openai", "schemathesis"):
    print(name, version(name))
