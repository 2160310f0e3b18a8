"""Ports, the agents' rendezvous and the ranks' store."""

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
    "start the first host first, and give all hosts an address of the first host that they can reach; its name may "
    "resolve to 127.0.1.1\n"
    "open the port on {address}:\n"
    "sudo ufw allow {port}/tcp  # or: sudo firewall-cmd --add-port={port}/tcp\n"
    "or let muster run set up the rendezvous:\n"
    "muster run --hosts {address},OTHER train.py"
)
_TRY_THE_WAY = (
    "nc -vz {address} {port}   # from the host that failed: timed out, refused, or open?\n"
    "muster check --hosts {address},OTHER"
)
_LOOK_AT_PEERS = "see the other ranks' logs: the rank that failed first is the cause"

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
        what="the port is already in use by another program",
        why="often an earlier run is still running, or two jobs use the same default port",
        confirm="ss -ltnp 'sport = :{port}'   # which process has it; Windows: netstat -ano | findstr :{port}",
        fix="find the process, and kill it if it is left over: ss -ltnp\n"
        "or use another port:\n"
        "torchrun --master-port 29501 train.py\ntorchrun --standalone train.py   # on one host\n"
        "or let the launcher choose the port:\n"
        "muster run train.py\nmuster run --hosts A,B train.py   # on several hosts",
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
        what="a program tried to use an address that {host} does not have",
        why="the first host listens on MASTER_ADDR; this fails if that is the address of another host, a "
        "public address behind NAT, or a name with an IPv6 address that is not configured",
        confirm="ip -brief address   # is {address} listed? Windows: ipconfig",
        fix="set MASTER_ADDR or --rdzv-endpoint to an address of rank 0's host that the other hosts can reach",
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
        what="this user or program is not allowed to open port {port}",
        why="ports below 1024 need root; Windows reserves ranges of ports",
        confirm="netsh interface ipv4 show excludedportrange protocol=tcp   # Windows\n"
        "sysctl net.ipv4.ip_unprivileged_port_start                # Linux: ports below it need root",
        fix="torchrun --master-port 29501 train.py   # another port",
    ),
    Rule(
        name="rendezvous-timeout",
        patterns=(r"The connection to etcd has failed", r"etcd\.EtcdConnectionFailed"),
        role=Role.CAUSE,
        what="the etcd server of the rendezvous does not answer",
        confirm="curl http://HOST:2379/health",
        fix="start the etcd server, or see its log; torch uses the v2 API:\n"
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
        what="not all hosts joined the rendezvous in time, or they cannot reach it",
        why="torchrun's agents connect to the rendezvous endpoint, by default port 29400. The port is blocked or closed, the "
        "first host was not started, or the hosts have different --nnodes, --rdzv-id or endpoints. Or the first host "
        "does not recognize the endpoint as its own because its host name resolves to 127.0.1.1",
        confirm=_TRY_THE_WAY,
        fix=_OPEN_THE_WAY,
    ),
    Rule(
        name="rendezvous-timeout",
        patterns=(r"error of type Rendezvous(?:Timeout|Connection)Error",),
        details=_ENDPOINT,
        role=Role.ASIDE,
        what="an agent can no longer reach the rendezvous endpoint",
        why="the agent on the host of the endpoint exited or is unreachable; the cause is in its log",
        confirm=_TRY_THE_WAY,
        fix="see the end of the first host's log: it names the cause",
    ),
    Rule(
        name="rendezvous-closed",
        patterns=(r"(?<!of.type.)\bRendezvousClosedError",),
        role=Role.PEER_GONE,
        what="a host joined the rendezvous after the run was over",
        why="the other hosts finished or failed, or the rendezvous still has the state of an earlier run with the same id",
        confirm="see the other hosts' logs: when and why did they exit?",
        fix="restart all hosts, with a new id for every run (the same on all hosts):\n"
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
        why="rank 0 listens on MASTER_ADDR and MASTER_PORT. It was not started, has exited, or listens on another address; or "
        "a firewall drops the packets",
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
        what="the store was reached, but another rank did not connect to it in time",
        why="that rank exited, hangs, is still busy with something else, or its host cannot reach this one",
        confirm="see the other ranks' logs: which one is missing, and what did it do last?\n"
        "muster check --hosts A,B   # can all hosts reach each other on all ports?",
        fix=f"{_LOOK_AT_PEERS}\n"
        "if a rank is only slow: init_process_group(timeout=timedelta(minutes=30))",
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
        what="a rank tried to connect to {address}, a loopback address, which reaches only the rank's own host",
        why="the name of a host resolves to a loopback address on that host (127.0.1.1 in /etc/hosts), and the host sent "
        "this address to the others. If all ranks are on one host, the cause is a rank that exited earlier",
        confirm='getent hosts "$(hostname)"   # on every host; must not be 127.…\n'
        "ip route get ADDRESS-OF-ANOTHER-HOST   # shows the right interface after dev",
        fix="export GLOO_SOCKET_IFNAME=IFACE NCCL_SOCKET_IFNAME=IFACE   # the interface to the other hosts\n"
        "torchrun --local-addr OWN-ADDRESS --rdzv-conf is_host=true …    # is_host=false on all but the first\n"
        "or fix it permanently: map the name to the real address in /etc/hosts. This prints the lines:\n"
        "muster doctor --only names   # on every host\n"
        "or use a launcher that does not depend on host names:\n"
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
        what="nothing listens on the store's address, {address}, port {port}: the connection was refused",
        why="rank 0 has not started yet, has exited, or listens on another address or port",
        confirm="ss -ltn 'sport = :{port}'   # on rank 0's host, while the others try to connect\n"
        "nc -vz {address} {port}      # from the host that failed",
        fix="start rank 0 first, and give all ranks the same MASTER_ADDR and MASTER_PORT\n"
        f"if rank 0 has exited: {_LOOK_AT_PEERS}",
    ),
)
