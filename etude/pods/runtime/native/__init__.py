"""The keeper and the agent as one small static C program, for those who have a compiler."""
