"""ssh errors, before a job starts."""

from torchmuster.known_errors.rule import Rule

_PORT = r"connect to host [\w.-]+ port (?P<port>\d+)"
_HOST = (
    r"connect to host (?P<machine>[\w.-]+) port",
    r"(?P<machine>[\w.-]+@[\w.-]+): Permission denied",
)

RULES = (
    Rule(
        name="ssh-permission-denied",
        patterns=(
            r"Permission denied \((?:publickey|password|gssapi|keyboard|hostbased)",
            r"Too many authentication failures",
            r"Permission denied, please try again",
            r"Load key \"[^\"\n]+\": (?:bad permissions|error in libcrypto|invalid format)",
            r"UNPROTECTED PRIVATE KEY FILE",
            r"Authentication failed\.",
            r"no supported authentication methods available",
        ),
        details=_HOST,
        what="{machine} rejects your ssh key",
        why="the public key is not in its ~/.ssh/authorized_keys, the user name or key is wrong, or files "
        "in its ~/.ssh are writable by others",
        confirm="ssh -v {machine} true 2>&1 | grep -E 'Offering|Authentications'\n"
        "muster check --hosts {machine},OTHER   # which hosts accept the login?",
        fix="ssh-copy-id {machine}\n"
        "chmod 700 ~/.ssh; chmod 600 ~/.ssh/authorized_keys ~/.ssh/id_*   # on both hosts\n"
        "use a specific key: ssh -o IdentitiesOnly=yes -i KEY {machine}",
    ),
    Rule(
        name="ssh-host-key",
        patterns=(
            r"Host key verification failed",
            r"REMOTE HOST IDENTIFICATION HAS CHANGED",
            r"authenticity of host '[^'\n]+' can't be established",
            r"No \w+ host key is known for",
            r"host key for \S+ has changed",
        ),
        details=(
            r"Host key for \[?(?P<machine>[\w.-]+)\]?",
            r"authenticity of host '(?P<machine>[\w.-]+)",
            r"ssh-keygen[^\n]*-R \"?(?P<machine>[\w.-]+)",
            *_HOST,
        ),
        what="the host key of {machine} is unknown here, or has changed",
        why="it was reinstalled, its address now belongs to another host, or the connection is intercepted",
        confirm="ssh-keyscan {machine} | ssh-keygen -lf -   # compare with the fingerprint from its owner",
        fix="ssh-keygen -R {machine}    # remove the old key\nssh {machine} true         # check the new one, and accept it",
    ),
    Rule(
        name="ssh-refused",
        patterns=(
            r"ssh: connect to host \S+ port \d+: Connection refused",
            r"ssh[^\n]{0,60}Connection refused",
            r"port 22: Connection refused",
        ),
        details=(*_HOST, _PORT),
        what="no ssh server listens on {machine}, port {port}",
        confirm="nc -vz {machine} {port}\nsystemctl status ssh sshd   # on {machine}; in a container: is sshd running?",
        fix="sudo systemctl enable --now ssh || sudo systemctl enable --now sshd   # on {machine}\n"
        "for another port: ssh -p PORT, or Port in ~/.ssh/config, which Muster also uses",
    ),
    Rule(
        name="ssh-timeout",
        patterns=(
            r"ssh: connect to host \S+ port \d+: (?:Connection timed out|Operation timed out|No route to host|"
            r"Network is unreachable)",
            r"port 22: (?:Connection timed out|Operation timed out|No route to host)",
            r"ssh[^\n]{0,60}(?:Connection timed out|banner exchange)",
        ),
        details=(*_HOST, _PORT),
        what="cannot connect to {machine} by ssh: no response",
        why="it is off or has another address, or a firewall drops the packets",
        confirm="ping -c 2 {machine}; ip route get {machine}\nnc -vz -w 5 {machine} {port}",
        fix="check that it is up and that the address is right\n"
        "sudo ufw allow 22/tcp   # on {machine}; in a cloud: allow port 22 in its security group",
    ),
)
