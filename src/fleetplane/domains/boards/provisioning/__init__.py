"""Installing k3s on boards over SSH: what to do (`plan`), how it is told (`ssh`), seeing it through."""
