"""What a sampler process samples with: our engine, or a server of vLLM or SGLang.

`server_backend.py` is the sampler's side of such a server: `child.py` starts it (`launch.py` knows its options),
`vllm.py` and `sglang.py` speak its HTTP interface, `weight_files.py` writes new weights for it, `probe.py` checks that
it samples from them, and `relay.py` serves our protocol in front of it, so that the sampler pool knows no backend.
"""
