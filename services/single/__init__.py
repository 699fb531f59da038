"""Frontend, router and worker in one process, for `headrace up --single`."""
