"""The tool server: a program in the pod that executes file, search and terminal tools, and its client on the host.

`inside/` runs in the pod: standard library only, Python 3.8 or newer, no secrets. `bundle.py` packs it into one file,
`client.py` starts it and sends requests. A pod is untrusted: every response is validated.
"""
