"""Discovery for several hosts: etcd holds the keys, a lease holds them to the process that put them."""
