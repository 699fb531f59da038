"""Calls of tools, and thinking, in what a model writes: one file a format, one table of them (formats.py). Pure."""
