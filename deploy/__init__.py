"""How Headrace is started."""
