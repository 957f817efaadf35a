"""The zygote and the guest init: one small static C program, the helper."""
