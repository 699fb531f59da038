"""An engine, its blocks and its scheduler behind one NATS contract."""
