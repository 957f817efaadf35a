"""Evaluation: held-out tasks and their statistics, codebase NLL, state tracking, plots.

    held_out.start(queue, step, tasks); record = summarise(held_out.results(queue, step))

Every mean over tasks comes with a bootstrap interval over tasks.
"""
