"""The tool server: one program in the pod that does what file, search and terminal tools ask, and our line to it.

`inside/` is what runs in the pod: the standard library only, Python 3.8 or newer, no secrets, nothing of ours imported.
`bundle.py` packs it into one file, `client.py` starts it and asks it. A pod is hostile: what the server answers is
text for a model and facts for a record, and is checked as such.
"""
