"""Discovery: keys under leases, watched by everyone; in etcd or in files."""
