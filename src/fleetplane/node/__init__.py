"""What agents of several domains share on the nodes they run on. Loads nothing of the store or the server."""
