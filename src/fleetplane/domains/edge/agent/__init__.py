"""The node side of edge: the daemon on a machine behind NAT. Loads nothing of the server."""
