"""Several servers on one database: one writes, the others follow and stand by."""
