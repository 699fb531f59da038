"""The two doors of the frontend: the HTTP port with its routes, and the NATS subjects."""
