"""Ways to run a pod on this machine.

A `Backend` creates pods from a `PodSpec`, adopts running ones and cleans up: `namespaces` (the default) and
`directories` (confined by Landlock, or not). Pods are forked from a zygote (`native`). `probe` tests which backend
works here.
"""
