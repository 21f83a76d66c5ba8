"""Owns two machines in one: namespaces of the kernel, joined by a virtual cable, each with an ssh server.

A machine is a network, a host name and a process tree of its own; files are shared, as on a cluster's storage. All of
it hangs on one process a machine: when that dies, the kernel ends everything on the machine and removes its end of the
cable. It dies with this process, so nothing has a name that could be left behind.

This file run by itself is that process: the ssh server (the client is the system's own).
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
# Neither name can be looked up, as in many containers: what needs an address has to get it from the launcher.
NAMES = ("onefold-one", "onefold-two")


@dataclass(slots=True)
class Machine:
    """One of the two: its address, and the process that everything there hangs on."""

    address: str
    server: subprocess.Popen[str]

    @property
    def first(self) -> int:
        """The machine's first process, as this system numbers it."""
        parent = self.server.pid
        (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return int(child)

    def enter(self, words: Sequence[str]) -> list[str]:
        """The command that runs `words` on this machine (among this system's processes)."""
        return ["nsenter", f"--target={self.first}", *_user(), "--net", "--uts", *words]

    def lose(self) -> None:
        """Pull the cable, then kill all that runs here: nobody gets to say goodbye."""
        subprocess.run(self.enter(["ip", "link", "set", "cable", "down"]), check=True)
        os.kill(self.first, signal.SIGKILL)
        self.server.wait()


def why_not() -> str:
    """Why there can be no such machines here; empty if there can."""
    missing = [name for name in ("unshare", "nsenter", "ip", "ssh", "ssh-keygen") if shutil.which(name) is None]
    if missing:
        return f"two hosts need the programs {', '.join(missing)}"
    script = "ip link set lo up && ip link add cable type veth peer name other && hostname onefold-probe"
    tried = subprocess.run([*_user_of_its_own(), *_UNSHARE, "sh", "-c", script], capture_output=True, text=True)
    if tried.returncode:
        return f"two hosts need network namespaces and veth, which this system refuses: {tried.stderr.strip()}"
    return ""


_UNSHARE = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def _user_of_its_own() -> list[str]:
    """Where we are not root: how to become root in a namespace of users."""
    return ["unshare", "--user", "--map-root-user"] if os.geteuid() else []


def _user() -> list[str]:
    return ["--user", "--preserve-credentials"] if os.geteuid() else []


@contextlib.contextmanager
def two_hosts(folder: Path, environment: Mapping[str, str]) -> Iterator[tuple[Machine, Machine]]:
    """Two machines, up and joined; commands over ssh get `environment` and nothing else."""
    _make_key(folder)
    with contextlib.ExitStack() as stack:
        inside = [*_user_of_its_own(), *_UNSHARE]
        one = Machine(ADDRESSES[0], stack.enter_context(_server(folder, environment, inside, NAMES[0], 22))[0])
        if os.geteuid():  # whoever joins two networks has to be root of both
            inside = ["nsenter", f"--target={one.first}", *_user(), *_UNSHARE]
        two = Machine(ADDRESSES[1], stack.enter_context(_server(folder, environment, inside, NAMES[1], 22))[0])
        peer = ["peer", "name", "cable", "netns", str(two.first)]
        subprocess.run(one.enter(["ip", "link", "add", "cable", "type", "veth", *peer]), check=True)
        for machine in (one, two):
            up = f"ip address add {machine.address}/24 dev cable && ip link set cable up && ip link set lo up"
            subprocess.run(machine.enter(["sh", "-c", up]), check=True)
        yield one, two


@contextlib.contextmanager
def this_host(folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """This machine with an ssh server on all of 127.0.0.0/8: the command that reaches it."""
    _make_key(folder)
    with _server(folder, environment, [], "", 0) as (_, port):
        yield f"{ssh_command(folder)} -p {port}"


def _make_key(folder: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "user"], check=True)


@contextlib.contextmanager
def _server(
    folder: Path, environment: Mapping[str, str], inside: Sequence[str], name: str, port: int
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """An ssh server, and its port. It ends with this process: it reads what only that can end."""
    variables = [f"{key}={value}" for key, value in environment.items()]
    words = [*inside, sys.executable, __file__, name, str(port), str(folder / "user.pub"), *variables]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield server, int(server.stdout.readline())
    finally:
        server.kill()  # the kernel ends a namespace's first process with it, and with that everything there
        server.communicate()


def ssh_command(folder: Path) -> str:
    """What reaches the machines: the real ssh, with a key and settings of its own."""
    settings = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "IdentitiesOnly=yes", "LogLevel=ERROR")
    alive = ("ServerAliveInterval=1", "ServerAliveCountMax=2")
    options = [word for setting in (*settings, *alive) for word in ("-o", setting)]
    return shlex.join(["ssh", "-F", "/dev/null", "-i", str(folder / "user"), "-l", "root", *options])


def _serve(name: str, port: int, key: str, environment: dict[str, str]) -> None:
    """Serve ssh until stdin ends; with a name, as the first process of a machine of that name."""
    import asyncio
    import socket

    import asyncssh

    async def shell(process: asyncssh.SSHServerProcess[bytes]) -> None:
        pipe = asyncio.subprocess.PIPE
        words = ("/bin/sh", "-c", process.command or "true")
        started = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
        await process.redirect(stdin=started.stdin, stdout=started.stdout, stderr=started.stderr)
        code = await started.wait()
        await process.stdout.drain()
        await process.stderr.drain()
        if code < 0:
            process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
        else:
            process.exit(code)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        host_key = asyncssh.generate_private_key("ssh-ed25519")
        listening = await asyncssh.listen(
            "0.0.0.0",
            port,
            server_host_keys=[host_key],
            authorized_client_keys=key,
            process_factory=shell,
            encoding=None,
        )
        print(listening.get_port(), flush=True)
        await loop.run_in_executor(None, sys.stdin.read)
        os._exit(0)

    if name:
        socket.sethostname(name)
    asyncio.run(serve())


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], dict(word.split("=", 1) for word in sys.argv[4:]))
