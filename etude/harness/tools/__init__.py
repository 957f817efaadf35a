"""The tool library: schemas shown to the model, validation of arguments, and execution of calls in a pod.

A tool is a `Tool`; `open_tool_executor` opens the tools of one session.
"""
