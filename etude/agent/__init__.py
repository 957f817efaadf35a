"""`etude agent`: the harness in a person's terminal, on a person's directory.

The session, the tools and the prompt are those of training. What is here is the rest: which model speaks (`models.py`),
how a directory gets into a pod and its changes back (`tree.py`, `intake.py`, `changes.py`, `apply.py`), what a person
sees and says (`screen.py`, `permission.py`, `terminal.py`), and sessions that go on another day (`saved.py`).
"""
