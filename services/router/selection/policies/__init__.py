"""The built-in routing policies, one per file; `selection.policy` has their interface. Pure."""
