"""Owns the choice of the network interface by which ranks on several machines talk over gloo.

gloo takes the interface of the machine's own name. That is often the loopback one (Debian writes `127.0.1.1 NAME` into
/etc/hosts), or one of several networks, and not the one that the hostfile means. What is right is known: the interface
by which this machine reaches another machine of the run.
"""

import ipaddress
import socket

import psutil  # type: ignore[import-untyped]


def leading_to(address: str) -> str | None:
    """The interface by which packets for `address` leave; None where nothing leads there, or where a name of this
    machine itself leads to the loopback interface, which no other machine can use."""
    try:
        places = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, _, _, place in places:
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(place)  # sends nothing
            except OSError:
                continue
            source = str(probe.getsockname()[0])
        if _is_loopback(source) and not _is_loopback(address):
            continue
        return _with_address(source)
    return None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _with_address(address: str) -> str | None:
    for name, found in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in found):
            return str(name)
    return "lo" if _is_loopback(address) else None  # all of 127.0.0.0/8 is there
