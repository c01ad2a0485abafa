"""The tables of the configuration file, each with its defaults and what it refuses."""
