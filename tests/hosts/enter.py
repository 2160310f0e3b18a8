"""Run a command inside a host: ``enter.py INIT_PID PIPE_FD COMMAND…``, a program of its own.

The command gets the namespaces of the host's first process, and a session of its own. As a process
cannot change its own pid namespace, this program stays outside as the command's parent: it writes the
command's pid to the pipe, waits, and ends as the command ended. Signals do not touch it, so that what
it reports is always the command's own end.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path


def main(words: list[str]) -> int:
    init, pipe, command = words[0], int(words[1]), words[2:]
    folder = Path.cwd()
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = [
        os.open(f"/proc/{init}/ns/{kind}", os.O_RDONLY) for kind in ("pid", "uts", "net", "mnt")
    ]
    for namespace in namespaces:
        if libc.setns(namespace, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the host of process {init}")
        os.close(namespace)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if child == 0:
        os.close(pipe)
        os.setsid()
        # What Python changed for itself, and a program expects to find unchanged.
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            os.chdir(folder)
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)
    while os.getsid(child) != child:  # a signal to its group would find nobody before
        time.sleep(0.001)
    os.write(pipe, str(child).encode())
    # The command's output ends when the command closes it, not when we do.
    os.closerange(0, 1024)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        ended_by = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if ended_by != signal.SIGKILL:
            signal.signal(ended_by, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {ended_by})
        os.kill(os.getpid(), ended_by)
    return os.WEXITSTATUS(status)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
