"""Structured output: the grammar that constrains an answer, and its compilation."""
