"""`headrace status` and `headrace explain`: show the state of a running fleet as tables."""
