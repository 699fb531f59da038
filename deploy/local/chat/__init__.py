"""`headrace chat`: asks a served model, once or in a conversation."""
