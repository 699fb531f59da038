"""How questions come in and answers go out: kvbm's Unix socket, replies on NATS, the span of a fetch. May import the
package pool."""
