"""Ports, the agents' rendezvous and the ranks' store: where the parts of a job meet."""

from torchmuster.known_errors.rule import Role, Rule

_PORT = (
    r"port: (?P<port>\d+)",
    r"\[?(?:[\w.-]+|::)\]?:(?P<port>\d{4,5})\b",
    r"--master[-_]port[= ](?P<port>\d+)",
    r"port (?P<port>\d{2,5})\b",
)
_ENDPOINT = (
    r"connect to \((?P<address>[\w.:-]+), (?P<port>\d+)\)",
    r"connect to \[?(?P<address>[\w.:-]+)\]?:(?P<port>\d+)",
    r"--rdzv[-_]endpoint[= ]\[?(?P<address>[\w.-]+)\]?:(?P<port>\d+)",
)
_AGENTS = r"Rendezvous(?:Timeout|Connection)Error|static_tcp_rendezvous|c10d_rendezvous_backend"
_AGENTS_PORT = r"connect to \([\w.:-]+, 29400\)|\]:29400\b"
_OPEN_THE_WAY = (
    "start the first machine first, and let every machine use an address of it that they can reach, not a "
    "name that means 127.0.1.1 there\n"
    "open the port on {address}:\n"
    "sudo ufw allow {port}/tcp  # or: sudo firewall-cmd --add-port={port}/tcp\n"
    "or let muster settle the meeting itself:\n"
    "muster run --hosts {address},OTHER train.py"
)
_TRY_THE_WAY = (
    "nc -vz {address} {port}   # from the machine that failed: timed out, refused, or open?\n"
    "muster check --hosts {address},OTHER"
)
_LOOK_AT_PEERS = "look at the other ranks' logs: the one that went first is the cause"

RULES = (
    Rule(
        name="port-in-use",
        patterns=(
            r"EADDRINUSE",
            r"address already in use",
            r"failed to listen on any local network address",
            r"WinError 10048|system error: 10048|only one usage of each socket address",
            r"port \d+ (?:is )?(?:not available|already in use|is in use|is already (?:in use|allocated))",
            r"ConnectionError: Tried to launch distributed communication on port",
            r"\[Errno (?:98|48)\]",
            r"errno: (?:98|48)\b",
            r"port is already allocated",
        ),
        unless=(
            r"Cannot assign requested address|EADDRNOTAVAIL",
            r"EACCES|errno: 13\b",
            r"WinError 100(?:13|49)",
        ),
        details=_PORT,
        what="the port that is to be opened is in use by another program",
        why="often it is an earlier run that has not ended, or two jobs that both take the default port",
        confirm="ss -ltnp 'sport = :{port}'   # who has it; Windows: netstat -ano | findstr :{port}",
        fix="see who has it, and end it if it is a left-over: ss -ltnp\n"
        "or take another port:\n"
        "torchrun --master-port 29501 train.py\ntorchrun --standalone train.py   # on one machine\n"
        "or leave the port to the launcher:\n"
        "muster run train.py\nmuster run --hosts A,B train.py   # on several machines",
    ),
    Rule(
        name="address-not-local",
        patterns=(
            r"Cannot assign requested address",
            r"EADDRNOTAVAIL",
            r"WinError 10049|(?:system )?error: 10049|requested address is not valid in its context",
            r"errno: 99\b|\[Errno (?:99|49)\]",
        ),
        details=(r"\[(?P<address>[\w.:-]+)\]:\d+",),
        what="a program was told to use an address that {host} does not have",
        why="the first machine opens the port at MASTER_ADDR; if that is another machine's address, an outside "
        "one behind NAT, or a name with an IPv6 address that is not set up, it cannot",
        confirm="ip -brief address   # is {address} there? Windows: ipconfig",
        fix="let MASTER_ADDR or --rdzv-endpoint be an address of the machine with rank 0, as the others see it",
    ),
    Rule(
        name="port-not-permitted",
        patterns=(
            r"WinError 10013|system error: 10013|forbidden by its access permissions",
            r"name: EACCES",
            r"(?:bind|listen)…(?:errno: 13|\[Errno 13\]) ?-? ?Permission denied",
            r"\.bind\([^\n]*\n(?:[^\n]*\n){0,2}?PermissionError: \[Errno 13\]",
        ),
        details=_PORT,
        what="port {port} may not be opened by this user or program",
        why="ports below 1024 are for root; Windows keeps whole ranges of ports for itself",
        confirm="netsh interface ipv4 show excludedportrange protocol=tcp   # Windows\n"
        "sysctl net.ipv4.ip_unprivileged_port_start                # Linux: ports below it need root",
        fix="torchrun --master-port 29501 train.py   # another port",
    ),
    Rule(
        name="rendezvous-timeout",
        patterns=(r"The connection to etcd has failed", r"etcd\.EtcdConnectionFailed"),
        role=Role.CAUSE,
        what="the etcd server at which the agents meet does not answer",
        confirm="curl http://HOST:2379/health",
        fix="start it, or see its log; torch speaks the API of version 2:\n"
        "etcd --enable-v2 --listen-client-urls http://0.0.0.0:2379 --advertise-client-urls http://HOST:2379",
    ),
    Rule(
        name="rendezvous-timeout",
        patterns=(
            r"(?<!of.type.)\bRendezvous(?:Timeout|Connection)Error",
            r"connection to the C10d store has failed",
            r"(?:timed out|failed to connect)…connect to (?:any network address of )?\([\w.:-]+, 29400\)",
            r"client socket has (?:timed out|failed to connect)…\]?:29400\b",
            r"static_tcp_rendezvous[\s\S]{0,3000}?client socket has",
            r"c10d_rendezvous_backend[\s\S]{0,3000}?(?:client socket has|Connection refused|timed out)",
            r"rendezvous…did not complete within \d+|Rendezvous timeout",
        ),
        unless=(r"gai error|gaierror|Name or service not known", r"No route to host"),
        details=_ENDPOINT,
        role=Role.PEER_LATE,
        what="the machines did not all come to the meeting point in time, or cannot reach it",
        why="torchrun's agents meet at the endpoint, port 29400 unless told otherwise. It is blocked or closed, "
        "the first machine was not started or does not recognise the endpoint as itself (its host name "
        "means 127.0.1.1), or the machines were given different --nnodes, --rdzv-id or endpoints",
        confirm=_TRY_THE_WAY,
        fix=_OPEN_THE_WAY,
    ),
    Rule(
        name="rendezvous-timeout",
        patterns=(r"error of type Rendezvous(?:Timeout|Connection)Error",),
        details=_ENDPOINT,
        role=Role.ASIDE,
        what="an agent can no longer reach the meeting point",
        why="the machine that held it has ended or is cut off; what ended it is in its own log",
        confirm=_TRY_THE_WAY,
        fix="look at the log of the first machine: what it ended with is the cause",
    ),
    Rule(
        name="rendezvous-closed",
        patterns=(r"(?<!of.type.)\bRendezvousClosedError",),
        role=Role.PEER_GONE,
        what="a machine came to the meeting after the run was over",
        why="the others have finished or failed, or an earlier run with the same id is still remembered",
        confirm="look at the other machines' logs: when, and of what, did they end?",
        fix="start all machines again, with an id of its own for every run (the same on all machines):\n"
        "torchrun --rdzv-id run-2 train.py",
    ),
    Rule(
        name="store-connect-timeout",
        patterns=(
            r"client socket has timed out",
            r"client socket has failed to connect to any network address",
            r"client socket has failed to connect…errno: 110",
            r"client socket has failed to connect(?!…errno)(?!…system error)",
            r"system error: 10060|WinError 10060|connected party did not properly respond",
            r"TCP client failed to connect/validate to host",
            r"(?:TimeoutError|RuntimeError): connect\(\) timed out",
            r"(?:TCPStore|rendezvous\.py)…RuntimeError: Connection timed out",
        ),
        unless=(
            _AGENTS,
            _AGENTS_PORT,
            r"Connection refused|actively refused",
            r"No route to host|Network is unreachable",
            r"gai error|gaierror|Name or service not known",
            r"127\.0\.1\.1",
        ),
        details=_ENDPOINT,
        role=Role.PEER_LATE,
        what="a rank could not connect to the store at {address}, port {port}, in time",
        why="rank 0 opens MASTER_PORT at MASTER_ADDR. It was not started, or ended, or listens at another "
        "address; or a firewall throws the packets away",
        confirm=_TRY_THE_WAY,
        fix=_OPEN_THE_WAY,
    ),
    Rule(
        name="store-wait-timeout",
        patterns=(
            r"wait timeout after \d+ms",
            r"waiting for clients\. \d+/\d+ clients joined",
            r"Timed out initializing process group in store based barrier",
            r"store[- ]?>?\.?get\([^)]*\)…(?:Socket Timeout|timed? ?out)",
            r"(?:RuntimeError|DistStoreError|DistNetworkError|TimeoutError): Socket Timeout",
            r"Waiting in store based barrier",
            r"\bStore\b.{0,80}timed out",
            r"exit barrier…(?:Socket Timeout|timed? ?out)",
        ),
        unless=(r"store->get\([^)]*\)…(?:Connection reset|Broken pipe)",),
        role=Role.PEER_LATE,
        what="the store was reached, but another rank did not come to it in time",
        why="it ended before, hangs, is still at work on something else, or its machine cannot reach this one",
        confirm="look at the other ranks' logs: which one is missing, and what did it do last?\n"
        "muster check --hosts A,B   # can all machines reach each other on all ports?",
        fix=f"{_LOOK_AT_PEERS}\n"
        "if one is only slow: init_process_group(timeout=timedelta(minutes=30))",
    ),
    Rule(
        name="hostname-is-loopback",
        patterns=(
            r"client socket has (?:timed out|failed to connect)…\(?\[?127\.0\.1\.1\b",
            r"connectFullMesh failed…remote=\[(?:127\.|::1\])",
            r"pair\.cc…connect \[127\.[\d.]+\]…(?:refused|timed out)",
        ),
        details=(r"(?P<address>127\.[\d.]+\d)",),
        role=Role.PEER_GONE,
        what="a rank was told to connect to {address}, which on every machine is that machine itself",
        why="the name of a machine means a loopback address on it (a line 127.0.1.1 in /etc/hosts), so it told the "
        "others that address. Where all ranks are on one machine, the other rank ended before instead",
        confirm='getent hosts "$(hostname)"   # on every machine; must not be 127.…\n'
        "ip route get ADDRESS-OF-ANOTHER-MACHINE   # shows the right interface after dev",
        fix="export GLOO_SOCKET_IFNAME=IFACE NCCL_SOCKET_IFNAME=IFACE   # the interface to the other machines\n"
        "torchrun --local-addr OWN-ADDRESS --rdzv-conf is_host=true …    # is_host=false on all but the first\n"
        "or mend it for good: let the name mean the real address in /etc/hosts, which this gives the lines for:\n"
        "muster doctor --only names   # on every machine\n"
        "or use what does not depend on it:\n"
        "muster run --hosts A,B train.py",
    ),
    Rule(
        name="tcpstore-refused",
        patterns=(
            r"client socket has failed to connect…(?:errno: 111|Connection refused|10061)",
            r"system error: 10061|WinError 10061|target machine actively refused it",
            r"(?:TCPStore|rendezvous\.py|_create_c10d_store|c10d)…Connection refused",
            r"(?:RuntimeError|ValueError|DistNetworkError): Connection refused",
        ),
        unless=(
            _AGENTS,
            _AGENTS_PORT,
            r"gloo/transport|connectFullMesh|pair\.(?:cc|h)",
            r"127\.0\.1\.1",
            r"ssh: connect to host",
        ),
        details=_ENDPOINT,
        role=Role.PEER_GONE,
        what="nobody listens at the store's address, {address}, port {port}: the connection was refused",
        why="rank 0 was not started yet, has ended, or opened its port at another address or number",
        confirm="ss -ltn 'sport = :{port}'   # on the machine of rank 0, while the others try\n"
        "nc -vz {address} {port}      # from the machine that failed",
        fix="start rank 0 first, and give all ranks the same MASTER_ADDR and MASTER_PORT\n"
        f"if rank 0 has ended: {_LOOK_AT_PEERS}",
    ),
)
