"""The OpenAPI document, made from the types in `protocol`."""
