"""Virtual hosts: network namespaces of one Linux machine, joined by cables of a set speed."""
