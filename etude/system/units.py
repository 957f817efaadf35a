"""Format sizes for people."""


def format_bytes(count: float) -> str:
    """Format a number of bytes: 512 MiB, 1.5 GiB."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
