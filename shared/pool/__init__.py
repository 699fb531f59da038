"""The pool file of a machine's kvbm: its layout, its mapping, and the kernel locks that prove that its users live."""
