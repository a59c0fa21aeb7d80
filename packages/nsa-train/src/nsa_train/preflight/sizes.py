"""Sizes for messages."""


def in_units(size_bytes: int) -> str:
    """Return `size_bytes` with two decimals in GiB, below one in MiB, and below one of those in KiB."""
    power, unit = next(((power, unit) for power, unit in ((30, "GiB"), (20, "MiB")) if size_bytes >= 2**power), (10, "KiB"))
    return f"{size_bytes / 2**power:,.2f} {unit}"
