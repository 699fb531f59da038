"""Parses tool calls and reasoning in a model's text: one module per format, and a table of them (parser.py). Pure."""
