"""The bus: requests and streams over NATS, KV events over ZMQ or NATS."""
