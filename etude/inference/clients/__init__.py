"""Policies by where the model is: in this process, behind our server, behind vLLM, SGLang or any chat API."""
