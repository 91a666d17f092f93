"""Ranks without Slurm, forked from a process that has imported PyTorch: it is slow."""

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace


class Ranks:
    """Starts ranks of a script with the variables that Slurm and job.sh would set.

    `server` is a script that calls serve() after its imports.
    """

    def __init__(self, python: Path, server: Path = Path(__file__)):
        from first_aid import user_of  # not there in the server

        env = user_of(SimpleNamespace(env={})) | {"OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self.server = subprocess.Popen(
            [python, server], env=env, stdin=pipe, stdout=pipe, text=True
        )

    def __call__(
        self,
        folder: Path,
        *arguments: str,
        ranks: int = 1,
        script: Path | str = "main.py",
        warn_at: str = "",
        **env: str,
    ) -> list:
        """Run ranks to their end; warn one of them when the first has printed so."""
        from slurm_jobs import Result

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | env
        env |= {"SLURM_STEP_NUM_TASKS": str(ranks), "WORLD_SIZE": str(ranks)}
        variables = [
            env
            | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            | {"SLURM_NODEID": str(rank % 2)}  # --distribution=cyclic
            for rank in range(ranks)
        ]
        arguments = [str(argument) for argument in arguments]
        path = str((folder / script).absolute())
        request = json.dumps([path, arguments, str(folder), variables])
        logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
        for log in logs:
            log.write_text("")
        print(request, file=self.server.stdin, flush=True)
        processes = json.loads(self.server.stdout.readline())
        while warn_at and warn_at not in logs[0].read_text():
            time.sleep(0.001)
        if warn_at:
            os.kill(processes[-1], signal.SIGUSR1)
        codes = json.loads(self.server.stdout.readline())
        pairs = zip(logs, codes, strict=True)
        return [Result(log.read_text(), code) for log, code in pairs]

    def end(self) -> None:
        self.server.stdin.close()
        assert self.server.wait() == 0


def serve() -> None:
    for line in sys.stdin:
        script, arguments, folder, variables = json.loads(line)
        children = []
        for rank, env in enumerate(variables):
            children.append(os.fork())
            if children[-1] == 0:
                become(rank, script, arguments, folder, env)
        print(json.dumps(children), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(n, 0)[1]) for n in children]
        print(json.dumps(codes), flush=True)


def become(rank: int, script: str, arguments: list, folder: str, env: dict) -> None:
    """Run a script in this process, to its end."""
    os.chdir(folder)
    log = os.open(f"rank-{rank}.log", os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ |= env
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    signal.alarm(240)
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()  # such as what ends a loader's workers
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import torch.distributed
    import torch.optim.swa_utils
    import torch.utils.data

    assert torch  # imported before the ranks are forked
    serve()
