"""`headrace check`: measures what a machine, its servers and another machine can do, and says what to set."""
