"""The pool: shared memory that engines map, its arenas, and the locks that prove which engines live. Imports no other
package of kvbm."""
