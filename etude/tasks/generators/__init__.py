"""Generators of tasks from Python repositories with tests, without a language model.

A generator yields candidates; each is executed in pods, drafted, written as a Harbor task and validated.
"""
