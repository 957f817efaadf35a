"""Installation of a repository: from one of its revisions to an image in which its tests run without a network.

`checkout` reads a revision, `install` makes its image, `run_tests` runs tests in a pod of it; `commit_image` gives the
image of another commit with the same dependencies.
"""
