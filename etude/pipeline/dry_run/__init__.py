"""A dry run: what a recipe would do, take and start, and whether it can, without doing any of it.

    look      what the recipe names, as far as it is there now; everything that is wrong, together
    texts     how much text there is, and a sample of it
    probe     short measurements on this machine: real steps of the real network, real work on the sample
    needs     memory and disk, from the model's config and the recipe's numbers
    stages    one entry for each stage, put together from these; `learning` is reinforcement learning's part
    plan      all of it; `describe` is the way in
    show      the plan for people and for programs

Nothing is left behind: no run directory, no file beside the recipe. Only pods and rehearsed sessions, tried for a
moment, use a temporary directory of their own.
"""
