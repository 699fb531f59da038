"""Anthropic's Messages API as types, and its translation to a chat and back. Pure."""
