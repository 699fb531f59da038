"""`headrace up`: what it starts, how it starts them, and keeps them running."""
