"""The zygote and the guest init as one small static C program, for machines with a compiler."""
