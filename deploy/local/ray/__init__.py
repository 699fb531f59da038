"""`headrace up --on ray`: the services as actors of a Ray cluster, one program in each."""
