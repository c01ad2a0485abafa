"""Where machines come from: the contract, the registry, and the providers that ship with us.

`contract` says what is asked of a provider, `registry` finds one by name, `conformance` tries
whether it keeps its promises. `local` runs agents as processes of this machine, `mock` invents
machines for tests and rehearsals, `aws` makes EC2 instances.
"""
