"""Names, interfaces and ways between machines; peers that are gone or late."""

from torchmuster.known_errors.rule import Role, Rule

_ALL_WAYS = "muster check --hosts A,B   # every pair, both directions, all kinds of ports"
_LOOK_AT_PEERS = "look at the other ranks' logs: the one that went first is the cause"
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
        what="another rank, or the machine it was on, went away while this one was talking to it",
        why="the cause is in what that rank wrote before it ended, not in this error",
        confirm="grep -l Traceback runs/*/logs/rank-*.log   # which rank has an error of its own?\n"
        "dmesg | grep -i 'killed process'           # on each machine: did the kernel end one?",
        fix=f"{_LOOK_AT_PEERS}\nmuster run names it by itself",
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
        what="an open connection to the store or to another rank was cut",
        why="the rank at the other end ended, often rank 0, which holds the store; or it trained alone to its end, as "
        "torchrun does when the clocks of the machines are 16 s or more apart; or its torch is much older and "
        "does not understand this one; or something between the machines cuts idle connections",
        confirm="look at rank 0's log first: did it end before this? with how many ranks?\n"
        "muster check --hosts A,B   # compares versions and clocks, and tries the ways between the machines",
        fix=f"{_LOOK_AT_PEERS}\nif the versions differ: install the same torch on every machine\n"
        "if the clocks do: set them, or use what does not depend on them and starts with all machines or not at all:\n"
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
        what="the process at the other end of a connection ended or was cut off",
        confirm="look at the logs of the other processes: which ended first?",
        fix="look at what the other process wrote before it ended: that is the cause",
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
        what="{host} cannot find the address of a name, often its own or the one of MASTER_ADDR",
        confirm="getent hosts {name}          # the name in question\n"
        "muster doctor --only names   # on {host}: its own name; if that is the one, the line to add",
        fix="put the name into /etc/hosts on {host}, or use addresses:\n"
        "echo 'ADDRESS {name}' | sudo tee -a /etc/hosts\n"
        "where it is a machine's own name, this does not depend on it:\n"
        "muster run --hosts A,B train.py",
    ),
    Rule(
        name="hostname-unresolvable",
        patterns=(r"hostname of the client socket cannot be retrieved",),
        role=Role.ASIDE,
        what="{host} cannot find the name of an address (reverse look-up)",
        why="it delays every connection to the store, and does no other harm",
        confirm="getent hosts ADDRESS   # of the machine with rank 0; slow or empty?",
        fix="put the machines into /etc/hosts on {host}",
    ),
    Rule(
        name="hostname-unresolvable",
        patterns=(r"^(?:Error: )?failed to connect to (?P<name>[a-z][\w-]*)\s*$",),
        role=Role.SYMPTOM,
        what="a machine could not be reached by its name, {name}",
        why="a name that only the own network's Windows or macOS machines know is not found from elsewhere",
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
        what="the ranks could not connect to each other: no way to {address} for gloo",
        why="where no rank failed before, a firewall is between the machines (every rank opens a port of its own, "
        "any number), or gloo took an interface that the others cannot reach, such as docker0 with 172.17.0.1",
        confirm=f"ip route get {{address}}   # on the machine that failed\n{_ALL_WAYS}",
        fix="allow all TCP ports between the machines, in both directions:\n"
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
        what="gloo finds no address: GLOO_SOCKET_IFNAME names a network interface that {host} lacks, or its own "
        "host name means no address of it",
        why="the name must be exact, and the same variable goes to all machines whose interfaces may be called "
        "differently; NCCL's forms such as ^lo or =eth0 are not understood",
        confirm="ip -brief address; env | grep SOCKET_IFNAME   # is {interface} there?\n"
        "muster check --hosts A,B   # names the machine, and the interface to name instead",
        fix="unset both; muster run chooses the interface on each machine:\n"
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
        what="there is no way from {host} to {address}",
        why="either no route leads there, the machine is not there, or a firewall refuses with 'prohibited' (firewalld "
        "and RHEL do); a plain closed port would say 'refused'",
        confirm="ip route get {address}\nping -c 2 {address}   # answers, but the port does not: a firewall",
        fix="on {address}:\nsudo firewall-cmd --add-source=OTHER-ADDRESS --zone=trusted\n"
        "or use an address that both machines have a route to, and its interface: "
        "export NCCL_SOCKET_IFNAME=IFACE GLOO_SOCKET_IFNAME=IFACE",
    ),
    Rule(
        name="address-family-ipv6",
        patterns=(r"Address family not supported by protocol", r"errno: 97\b", r"EAFNOSUPPORT"),
        role=Role.ASIDE,
        what="IPv6 was tried, and {host} does not have it",
        why="torch tries IPv6 first, then IPv4; by itself this is only a warning, and something else stopped the run",
        confirm="cat /proc/sys/net/ipv6/conf/all/disable_ipv6   # 1: switched off",
        fix="use an IPv4 address instead of a name: MASTER_ADDR=10.0.0.1\n"
        "or take the IPv6 line of that name out of /etc/hosts",
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
        what="a collective operation ran out of time: another rank did not come to the same point",
        why="it hangs, ended without a word, does something else (saves, evaluates, tokenises), has more or fewer "
        "batches, or the network lets small packets through and loses large ones (MTU)",
        confirm="py-spy dump --pid PID   # on each machine, while it hangs: where is the rank that does not wait?\n"
        f"{_ALL_WAYS}, and path MTU",
        fix="find out what the other ranks did meanwhile (their logs)\n"
        "if one is only slow: init_process_group(timeout=timedelta(minutes=30))\n"
        "if the counts of batches differ: DistributedSampler(…, drop_last=True), or the Join context",
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
        what="the NCCL watchdog of this rank itself stands still, so the process was ended",
        why="it waits for the GPU, the GIL or the store: a CUDA call that hangs, a broken link or GPU, or a machine "
        "that is overloaded or was suspended",
        confirm="nvidia-smi; dmesg | grep -i xid   # is a GPU in trouble?\n"
        "muster check --hosts A,B",
        fix="if the machine is only slow:\nexport TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800\n"
        "else see why it hangs: TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 muster run …",
    ),
)
