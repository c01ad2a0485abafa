"""The node side of proxies: drives a real NGINX the way the server wants it."""
