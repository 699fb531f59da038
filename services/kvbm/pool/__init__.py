"""The pool: shared memory that engines map, its arenas, and proof of which engines are alive."""
