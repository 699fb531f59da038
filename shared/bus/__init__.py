"""The bus: requests and streams over NATS, KV events over ZMQ, and an in-process fake of both."""
