"""Discovery: keys under leases, watched by everyone; in etcd, in files, or in memory."""
