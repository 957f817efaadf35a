"""Clients of a model in this process, or behind an Etude server, vLLM, SGLang or any OpenAI-compatible chat API."""
