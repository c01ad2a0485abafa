"""Rollouts: moving targets from one version of something to another, in waves. Pure."""
