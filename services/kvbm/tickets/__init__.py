"""Tickets: which engine may write to or read from which slots, and until when. May import tiers."""
