"""Certificates: the server as the only client of the certificate authority, for the whole fleet."""
