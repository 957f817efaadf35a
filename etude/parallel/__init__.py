"""Several processes that train one model: device mesh, sharding, expert and context parallelism.

One process without `[parallel]` has no mesh (`None`) and pays nothing. Reading the settings
(`etude.parallel.settings`) needs no torch.
"""
