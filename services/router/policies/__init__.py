"""The built-in routing policies, one a file; `services.router.policy` holds their interface."""
