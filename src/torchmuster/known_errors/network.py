"""Host names, interfaces and routes between hosts; peers that are gone or late."""

from torchmuster.known_errors.rule import Role, Rule

_ALL_WAYS = "muster check --hosts A,B   # every pair, both directions, all port ranges"
_LOOK_AT_PEERS = "see the other ranks' logs: the rank that failed first is the cause"
_TORCH = r"(?:gloo|c10d|nccl|torch\.distributed|torch/distributed|TCPStore|SocketImpl)"

RULES = (
    Rule(
        name="peer-died",
        patterns=(
            r"Connection closed by (?:remote )?peer",
            r"ncclRemoteError",
            r"remote process exited",
            r"remote worker crashing",
        ),
        role=Role.PEER_GONE,
        what="another rank exited, or its host became unreachable, while this rank was connected to it",
        why="the cause is in the last log lines of that rank, not in this error",
        confirm="grep -l Traceback runs/*/logs/rank-*.log   # which rank has an error of its own?\n"
        "dmesg | grep -i 'killed process'           # on each host: did the kernel kill a rank?",
        fix=f"{_LOOK_AT_PEERS}\nmuster run names that rank automatically",
    ),
    Rule(
        name="connection-reset",
        patterns=(
            rf"{_TORCH}…(?:Connection reset by peer|Broken pipe)",
            r"recvValue failed|sendBytes failed|recvVector failed|recvBytes failed",
            r"(?:RuntimeError|DistNetworkError|DistBackendError): (?:Connection reset by peer|Broken pipe)",
            r"Call to (?:recv|send|read|write)[^\n]{0,80}failed : (?:Connection reset|Broken pipe)",
            r"Connection reset by peer \[[\d.]+\]",
            r"Failed to recv, got 0 bytes",
            r"Connection was likely closed",
        ),
        unless=(r"ncclRemoteError",),
        role=Role.PEER_GONE,
        what="an open connection to the store or to another rank was closed",
        why="the rank at the other end exited, often rank 0, which serves the store. Or that rank trained alone and "
        "finished, which torchrun allows if the hosts' clocks differ by 16 s or more. Or its torch version is "
        "incompatible, or a device between the hosts drops idle connections",
        confirm="see rank 0's log first: did it exit before this? with how many ranks?\n"
        "muster check --hosts A,B   # compares versions and clocks, and tests the connections between hosts",
        fix=f"{_LOOK_AT_PEERS}\nif the versions differ: install the same torch on every host\n"
        "if the clocks differ: set them, or use a launcher that does not depend on them and starts on all hosts or none:\n"
        "muster run --hosts A,B train.py",
    ),
    Rule(
        name="connection-reset",
        patterns=(
            r"WinError 1005[34]|system error: 1005[34]|forcibly closed by the remote host",
            r"ConnectionResetError: \[Errno 104\]",
            r"ConnectionResetError|ConnectionAbortedError",
            r"BrokenPipeError: \[Errno 32\]",
        ),
        role=Role.SYMPTOM,
        unless=(r"DataLoader worker|reduction\.dump", r"ssh|huggingface|https?://"),
        what="the process at the other end of a connection exited or became unreachable",
        confirm="see the logs of the other processes: which exited first?",
        fix="see the last log lines of the other process: they name the cause",
    ),
    Rule(
        name="hostname-unresolvable",
        patterns=(
            r"Temporary failure in name resolution",
            r"Name or service not known",
            r"nodename nor servname provided",
            r"No address associated with hostname",
            r"getaddrinfo failed|WinError 11001|error: 11001|No such host is known",
            r"socket\.gaierror",
            r"gai error: -\d",
            r"Failed to look up the IP address for the hostname",
            r"could ?n[o']t resolve host(?:name)?",
            r"failed to resolve '",
            r"Name does not resolve",
            r"gethostbyname[^\n]{0,20} fail",
            r"NameResolutionError",
            r"Unknown host\b",
        ),
        details=(
            r"host(?:name)? \"?(?P<name>[\w-][\w.-]*)\"?: (?:Name|Temporary|nodename)",
            r"addresses of \((?P<name>[\w.-]+), \d+\)",
            r"resolve (?:host(?:name)? )?'?(?P<name>[\w-][\w.-]+)",
        ),
        what="{host} cannot resolve a host name, often its own or MASTER_ADDR",
        confirm="getent hosts {name}          # the name in question\n"
        "muster doctor --only names   # on {host}: checks its own name, and prints the line to add",
        fix="add the name to /etc/hosts on {host}, or use addresses:\n"
        "echo 'ADDRESS {name}' | sudo tee -a /etc/hosts\n"
        "muster run does not depend on the host's own name:\n"
        "muster run --hosts A,B train.py",
    ),
    Rule(
        name="hostname-unresolvable",
        patterns=(r"hostname of the client socket cannot be retrieved",),
        role=Role.ASIDE,
        what="{host} cannot resolve an address to a name (reverse lookup)",
        why="the failed lookup delays every connection to the store, and has no other effect",
        confirm="getent hosts ADDRESS   # of rank 0's host; slow or empty?",
        fix="add the hosts to /etc/hosts on {host}",
    ),
    Rule(
        name="hostname-unresolvable",
        patterns=(r"^(?:Error: )?failed to connect to (?P<name>[a-z][\w-]*)\s*$",),
        role=Role.SYMPTOM,
        what="cannot connect to {name}: the name may not resolve",
        why="names that only Windows or macOS announce on the local network do not resolve elsewhere",
        confirm="getent hosts {name}; ping -c 2 {name}   # Windows: nslookup {name}",
        fix="use its address instead of its name: MASTER_ADDR=192.168.1.10",
    ),
    Rule(
        name="gloo-connect-failed",
        patterns=(
            r"connectFullMesh failed",
            r"(?:gloo/transport|pair\.(?:cc|h))…connect…(?:refused|timed out|timeout)",
            r"Connect timeout \[",
        ),
        unless=(
            r"remote=\[(?:127\.|::1\])",
            r"connect \[127\.",
            r"No route to host|Network is unreachable",
            r"Timed out waiting \d+ms for (?:recv|send)",
            r"Connection closed by peer|Connection reset by peer|Broken pipe",
        ),
        details=(r"remote=\[(?P<address>[\d.]+)\]", r"(?:connect|timeout) \[(?P<address>[\d.]+)\]"),
        role=Role.PEER_GONE,
        what="the ranks could not connect to each other: gloo cannot reach {address}",
        why="if no rank failed before, a firewall blocks the connection (every rank listens on its own random "
        "port), or gloo chose an interface that the others cannot reach, such as docker0 with 172.17.0.1",
        confirm=f"ip route get {{address}}   # on the host that failed\n{_ALL_WAYS}",
        fix="allow all TCP ports between the hosts, in both directions:\n"
        "sudo ufw allow from OTHER-ADDRESS\n"
        "or choose the interface:\nexport GLOO_SOCKET_IFNAME=IFACE   # as ip route get shows it",
    ),
    Rule(
        name="gloo-no-interface",
        patterns=(
            r"Unable to find address for: ?(?P<interface>[\w.^=,:-]+)?",
            r"Unable to find interface(?: for)?:? ?\[?(?P<interface>[\w.:-]+)?",
            r"Unable to resolve hostname to a \(local\) address",
            r"makeTCPDevice\(\): interface or hostname can't be empty",
            r"ifa != nullptr",
        ),
        what="gloo finds no address: GLOO_SOCKET_IFNAME names a network interface that {host} does not have, or its "
        "host name does not resolve to one of its addresses",
        why="the name must be exact, and all hosts get the same value although their interfaces may have other "
        "names; gloo does not support NCCL's syntax such as ^lo or =eth0",
        confirm="ip -brief address; env | grep SOCKET_IFNAME   # is {interface} listed?\n"
        "muster check --hosts A,B   # reports the host, and the interface to use instead",
        fix="unset both; muster run chooses the interface on each host:\n"
        "unset GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME\n"
        "or name one that {host} has:\nexport GLOO_SOCKET_IFNAME=eth0",
    ),
    Rule(
        name="network-unreachable",
        patterns=(
            r"No route to host",
            r"Network is unreachable",
            r"EHOSTUNREACH|ENETUNREACH",
            r"WinError 10051|WinError 10065|system error: 100(?:51|65)",
            r"admin(?:istratively)?[- ]prohibited",
        ),
        unless=(r"ssh: connect to host",),
        details=(
            r"\[(?P<address>[\d.]+)\]…No route",
            r"connect to \(?\[?(?P<address>[\w.-]+)",
            r"to (?P<address>\d+\.\d+\.\d+\.\d+)",
        ),
        what="{host} has no route to {address}",
        why="there is no route, the host is down, or a firewall rejects the packets with 'prohibited' (the default of firewalld "
        "and RHEL); a closed port would report 'refused'",
        confirm="ip route get {address}\nping -c 2 {address}   # if ping works and the port does not: a firewall",
        fix="on {address}:\nsudo firewall-cmd --add-source=OTHER-ADDRESS --zone=trusted\n"
        "or use an address that both hosts have a route to, and its interface: "
        "export NCCL_SOCKET_IFNAME=IFACE GLOO_SOCKET_IFNAME=IFACE",
    ),
    Rule(
        name="address-family-ipv6",
        patterns=(r"Address family not supported by protocol", r"errno: 97\b", r"EAFNOSUPPORT"),
        role=Role.ASIDE,
        what="torch tried IPv6, which {host} does not have",
        why="torch tries IPv6 first, then IPv4; this is only a warning, and something else stopped the run",
        confirm="cat /proc/sys/net/ipv6/conf/all/disable_ipv6   # 1: disabled",
        fix="use an IPv4 address instead of a name: MASTER_ADDR=10.0.0.1\n"
        "or remove the IPv6 line of that name from /etc/hosts",
    ),
    Rule(
        name="collective-timeout",
        patterns=(
            r"caught collective operation timeout",
            r"collective operation timed out",
            r"Timed out waiting \d+ms for (?:recv|send) operation",
            r"timed out in monitoredBarrier|failed to pass monitoredBarrier|monitoredBarrier",
            r"NCCL operations have failed or timed out",
            r"Work(?:NCCL|Gloo|XCCL|HCCL)\([^)]*\) ran for \d+ milliseconds before timing out",
            r"Operation timed out!",
            r"Timeout\(ms\)=\d+\) ran for",
            r"Application timeout caused pair closure",
            r"NCCL (?:operation|collective)[^\n]{0,40}time(?:d )?out",
        ),
        role=Role.PEER_LATE,
        what="a collective timed out: another rank did not reach the same point",
        why="that rank hangs, has exited, is busy (saving, evaluating, tokenizing) or has a different number of batches; "
        "or the network drops large packets (MTU)",
        confirm="py-spy dump --pid PID   # on each host, while it hangs: where is the rank that does not wait?\n"
        f"{_ALL_WAYS}, and path MTU",
        fix="find out what the other ranks did in the meantime (their logs)\n"
        "if a rank is only slow: init_process_group(timeout=timedelta(minutes=30))\n"
        "if the number of batches differs: DistributedSampler(…, drop_last=True), or the Join context",
    ),
    Rule(
        name="watchdog-heartbeat",
        patterns=(
            r"watchdog got stuck for \d+ ?s",
            r"watchdog got stuck",
            r"Heartbeat monitor timed out",
            r"watchdog hang or timeout",
            r"HeartbeatMonitor…(?:stuck|hang|timed out)",
        ),
        unless=(r"caught collective operation timeout",),
        role=Role.PEER_LATE,
        what="the NCCL watchdog of this rank is stuck, so the process was killed",
        why="it waits for the GPU, the GIL or the store: a CUDA call that hangs, a broken link or GPU, or a host "
        "that is overloaded or was suspended",
        confirm="nvidia-smi; dmesg | grep -i xid   # has a GPU reported errors?\n"
        "muster check --hosts A,B",
        fix="if the host is only slow:\nexport TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800\n"
        "else find out why it hangs: read the flight recorder's dumps\n"
        "torchfrtrace --prefix comm_lib_trace_rank_ ~/.cache/torch",
    ),
)
