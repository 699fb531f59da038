"""Puts a fleet in front of servers that run already: asks them what they are, and keeps an attached worker for each."""
