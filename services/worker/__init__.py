"""The worker: an engine, its blocks and its scheduler, which NATS subjects make available to frontends."""
