"""`headrace status` and `headrace explain`: what a running fleet says of itself, as tables."""
