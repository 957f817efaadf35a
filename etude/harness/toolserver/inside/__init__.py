"""The tool server as it runs in the pod. Modules here import only the standard library and each other."""
