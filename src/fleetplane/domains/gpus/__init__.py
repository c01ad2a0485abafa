"""GPUs: health as resources. Providers write, consumers watch.

The server side comes together in `domain`, the node side in `agent`; neither loads the other.
"""
