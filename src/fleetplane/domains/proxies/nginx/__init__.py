"""What may be written into an NGINX configuration: one reader, one table, used by server and agents alike."""
