"""Ways to run a pod on this machine; each says what it can do, and `probe.py` tries them."""
