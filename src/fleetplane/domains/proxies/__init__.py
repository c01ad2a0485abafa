"""Proxies: fleets of NGINX, told over REST what to serve and over gRPC how to serve it.

The server side comes together in `domain`, the node side in `agent`; neither loads the other.
"""
