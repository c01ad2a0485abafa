"""The server process: composition root, serving, backups, and what is done while it is stopped."""
