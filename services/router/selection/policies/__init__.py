"""The built-in routing policies, one a file; `services.router.selection.policy` holds their interface."""
