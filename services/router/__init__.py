"""The router: chooses a worker for each request, by what each worker caches and how busy it is."""
