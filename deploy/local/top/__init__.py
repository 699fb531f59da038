"""`headrace top`: a live view of a running fleet in a terminal, drawn by Rich."""
