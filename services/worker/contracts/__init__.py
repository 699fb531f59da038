"""What the shell, the engine process and each kind of engine agree on: messages, the runner, the mover, and the blocks
on the device. Imports no other package of the worker."""
