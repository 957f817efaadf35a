"""Comparing policies on tasks: who is better, by how much, how sure that is, and what it takes."""
