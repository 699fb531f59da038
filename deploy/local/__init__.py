"""The `headrace` command: up, status, chat."""
