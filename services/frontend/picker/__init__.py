"""The endpoint picker: a gateway asks over gRPC, by Envoy's ext_proc, which attached server gets a request."""
