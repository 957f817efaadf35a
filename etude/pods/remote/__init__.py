"""Pods of another machine: a host behind HTTP (`server`), its client, and the messages between them."""
