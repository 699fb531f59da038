"""The built-in routing policies, one a file; `selection.policy` holds their interface. Pure."""
