"""Parse and format sizes and durations: 512M, 1.5G, 90s, 1h30m."""

import re

from etude.errors import InputError
from etude.system.units import format_bytes

_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str, option: str) -> int:
    """Return the bytes of `512M` or `1.5GiB`; units are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found or not float(found[1]):
        raise InputError(f"{option} {text}: expected a size, such as 512M or 1.5G")
    return int(float(found[1]) * _SIZES[found[2].upper()])


def parse_seconds(text: str, option: str) -> float:
    """Return the seconds of `90`, `90s`, `5m` or `1h30m`."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    total = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text.strip() or not total:
        raise InputError(f"{option} {text}: expected a time, such as 90s, 5m or 1h30m")
    return total


def show_size(count: float | None) -> str:
    """Format a number of bytes, or - for None."""
    return "-" if count is None else format_bytes(count)


def show_seconds(count: float | None) -> str:
    """Format a rounded duration: 45s, 12m, 3h, 2d."""
    if count is None:
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if count >= 2 * size:
            return f"{count / size:.0f}{unit}"
    return f"{count:.0f}s"
