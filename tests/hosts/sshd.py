"""The files with which hosts reach each other by ssh: keys, what the client reads, what sshd reads.

Nothing of the machine's own ssh set-up is used or changed. OpenSSH takes a user's home from the user
database and not from ``HOME``; so a client is given the lab's settings by a program named ``ssh`` in
`SshFiles.programs`, which stands first in the hosts' ``PATH``.

Remote sessions get sshd's own short ``PATH`` and none of the client's variables, as on real machines.
"""

import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

PORT = 2222


class SshFiles:
    """The keys and settings of one lab."""

    def __init__(self, folder: Path, addresses: Mapping[str, str]) -> None:
        self.folder = folder
        self.config = folder / "ssh_config"
        self.known_hosts = folder / "known_hosts"
        self.programs = folder / "bin"
        self._identity = folder / "identity"
        folder.mkdir()
        _make_key(self._identity)
        for name in addresses:
            _make_key(folder / f"host_key_{name}")
            shutil.copy(self._identity.with_suffix(".pub"), self.authorized_keys(name))
        self.known_hosts.write_text("".join(self._known_host(name) for name in addresses))
        self.config.write_text(self._client_settings(addresses))
        self.programs.mkdir()
        program = self.programs / "ssh"
        config = shlex.quote(str(self.config))
        program.write_text(f'#!/bin/sh\nexec {_program("ssh")} -F {config} "$@"\n')
        program.chmod(0o755)

    def authorized_keys(self, name: str) -> Path:
        """Who may come in at this host; read at each login."""
        return self.folder / f"authorized_keys_{name}"

    def log(self, name: str) -> Path:
        return self.folder / f"sshd_{name}.log"

    def server(self, name: str, variables: Mapping[str, str]) -> list[str]:
        """Return the command that serves this host; its sessions have these variables."""
        # Of several SetEnv lines only the first would count.
        quoted = " ".join(f'"{key}={value}"' for key, value in variables.items())
        settings = self.folder / f"sshd_config_{name}"
        settings.write_text(
            f"Port {PORT}\n"
            "ListenAddress 0.0.0.0\n"
            f"HostKey {self.folder}/host_key_{name}\n"
            "PidFile none\n"
            f"AuthorizedKeysFile {self.authorized_keys(name)}\n"
            "PasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\n"
            "UsePAM no\n"
            "StrictModes no\n"
            "PermitRootLogin prohibit-password\n"
            "PrintMotd no\n"
            "PrintLastLog no\n"
            f"SetEnv {quoted}\n"
        )
        # sshd refuses to run without it, and no service has made it here.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        return [_program("sshd"), "-D", "-f", str(settings), "-E", str(self.log(name))]

    def _known_host(self, name: str) -> str:
        kind, key = (self.folder / f"host_key_{name}.pub").read_text().split()[:2]
        return f"{name} {kind} {key}\n"

    def _client_settings(self, addresses: Mapping[str, str]) -> str:
        hosts = "".join(
            f"Host {name} {address}\n  HostName {address}\n  HostKeyAlias {name}\n"
            for name, address in addresses.items()
        )
        return (
            f"{hosts}Host *\n"
            f"  Port {PORT}\n"
            "  User root\n"
            f"  IdentityFile {self._identity}\n"
            "  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known_hosts}\n"
            "  GlobalKnownHostsFile /dev/null\n"
        )


def _make_key(path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
    )


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed")
    return found
