"""The requests of a worker: validation, attempts, and the step frames that go back to frontends. Imports no other
package of the worker."""
