"""Hosts that are network namespaces of this machine, joined by a bridge that this process reaches too.

Each has a link of its own, which can be cut and joined again. Making them takes root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.cluster.ray_head import Host

PREFIX_LENGTH = 24


class NotPermitted(Exception):
    """This process may not make network namespaces; the message says why."""


def ip(*arguments: str) -> None:
    """Run ip(8). Raises CalledProcessError."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def permitted() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts, taken down again at the end. Raises NotPermitted."""
    if not permitted():
        raise NotPermitted("network namespaces take root and ip(8) of iproute2")
    tag = f"{os.getpid() % 10_000:04d}"
    network = f"10.{os.getpid() % 200 + 20}.77"
    with ExitStack() as stack:
        try:
            _bridge(stack, tag, network)
            made = [_host(stack, tag, network, number) for number in range(1, count + 1)]
        except subprocess.CalledProcessError as error:
            raise NotPermitted(f"{' '.join(error.cmd)}: {error.stderr.decode().strip()}") from error
        yield made


def _bridge(stack: ExitStack, tag: str, network: str) -> None:
    ip("link", "add", f"sb{tag}", "type", "bridge")
    stack.callback(ip, "link", "del", f"sb{tag}")
    ip("addr", "add", f"{network}.254/{PREFIX_LENGTH}", "dev", f"sb{tag}")
    ip("link", "set", f"sb{tag}", "up")


def _host(stack: ExitStack, tag: str, network: str, number: int) -> Host:
    name, veth = f"slip{tag}-{number}", f"sv{tag}{number}"
    ip("netns", "add", name)
    stack.callback(ip, "netns", "del", name)
    ip("link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", name)
    ip("link", "set", veth, "master", f"sb{tag}", "up")
    ip("-n", name, "addr", "add", f"{network}.{number}/{PREFIX_LENGTH}", "dev", "eth0")
    ip("-n", name, "link", "set", "eth0", "up")
    ip("-n", name, "link", "set", "lo", "up")
    return Host(f"{network}.{number}", name)


def cut(host: Host) -> None:
    """Nothing reaches the host or leaves it until `join`."""
    ip("-n", host.namespace, "link", "set", "eth0", "down")


def join(host: Host) -> None:
    ip("-n", host.namespace, "link", "set", "eth0", "up")
