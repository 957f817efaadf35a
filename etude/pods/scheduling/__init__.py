"""Decide when and where pods start.

`admission` admits pods on one host by live `pressure` and queues the others; `pools` holds pods started in advance;
`router` chooses a host of a fleet.
"""
