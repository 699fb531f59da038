"""The built-in routing policies, `kv` and the simpler ones; `selection.policy` has their interface. Pure."""
