"""Installing k3s on boards over SSH: the steps (`plan`), the transport (`ssh`), the engine that runs them."""
