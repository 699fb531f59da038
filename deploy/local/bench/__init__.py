"""`headrace bench`: a sweep of loads against an OpenAI endpoint."""
