"""Ollama's API as types, and its translation to a chat or a completion and back."""
