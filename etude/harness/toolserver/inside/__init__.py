"""What runs in the pod. Nothing in here may import anything but the standard library and its own neighbours."""
