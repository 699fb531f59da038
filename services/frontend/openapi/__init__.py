"""The OpenAPI document, made of the types in `protocol`."""
