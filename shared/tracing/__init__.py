"""Traces of requests across the services: W3C's traceparent, which requests are traced, spans over OTLP."""
