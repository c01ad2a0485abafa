"""Bells between servers that share a database: whoever wrote rings, the others read the log at once."""
