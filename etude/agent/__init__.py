"""`etude agent`: a harness session in the terminal, on the user's own directory.

The directory is copied into a pod, the model works there with the tools and prompt of `harness`, and the files that
differ are shown and applied on request. Sessions are saved after every answer and can be resumed. Nothing outside the
directory and the session store is written.
"""
