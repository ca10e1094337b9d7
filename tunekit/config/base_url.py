"""Check of the key `base_url`, the address of a server."""

from urllib.parse import urlsplit

from tunekit.errors import FieldError


def check_base_url(url: str, schemes: tuple[str, ...] = ("http", "https")) -> None:
    """Raise FieldError unless `base_url` is an address with a host."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid brackets or port
        is_address = False
    if not is_address or " " in url or not url.isprintable():
        expected = " or ".join(f"{scheme}://" for scheme in schemes[:2])
        raise FieldError("base_url", f"must be an address that starts with {expected}, got {url!r}")
