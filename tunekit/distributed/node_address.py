"""Addresses of this node: the rendezvous endpoint, and the interface over which the nodes meet."""

import errno
import fcntl
import socket
import struct

from tunekit.errors import UserError

SIOCGIFADDR = 0x8915
BACKLOG = 4096  # connections before the store accepts them


def create_listener(host: str, port: int, node_rank: int | None) -> socket.socket | None:
    """Listening socket if this node hosts the rendezvous: node rank 0, or the node with the endpoint's address."""
    if node_rank is not None and node_rank > 0:
        return None
    if node_rank is None and not has_address(host, port):
        return None
    try:
        return socket.create_server(("", port), backlog=BACKLOG)  # the name may resolve to 127.0.1.1 on its own node
    except OSError as error:
        if node_rank is None and error.errno == errno.EADDRINUSE:
            return None  # another process of this node listens
        raise UserError(f"--rdzv-endpoint {host}:{port}: cannot listen there: {error.strerror}") from error


def has_address(host: str, port: int) -> bool:
    """Whether the address of a host is one of this node. Raises UserError for an unknown host."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UserError(f"--rdzv-endpoint {host}:{port}: host not found ({error.strerror})") from error
    try:
        with socket.socket(family, kind) as probe:
            probe.bind((address[0], 0))
    except OSError:
        return False
    return True


def find_local_address(host: str, port: int) -> str:
    """Address of this node on the route to `host`. Sends nothing."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def find_interface(address: str) -> str | None:
    """Name of the network interface with an IPv4 address. gloo may choose a different interface by default."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                response = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # no IPv4 address
                continue
            if socket.inet_ntoa(response[20:24]) == address:
                return name
    return None
