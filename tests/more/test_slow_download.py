"""The download of CIFAR-10, from a server that is slow."""

import contextlib
import http.server
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_launch import ONE_EACH, ONE_EPOCH, SMALL, TWO_EACH


@contextlib.contextmanager
def serve_slowly(path: Path, address: str):
    """Serve a file to nodes, but only some bytes of it before `go` is set.

    Give its URL, to which anything may be added, the requests that came, and `go`.
    """
    go, requests = threading.Event(), queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, _):
            return str(path)

        def copyfile(self, source, outputfile):
            if self.headers["Method"] == "HEAD":  # torchvision looks for redirections
                return
            requests.put(self.path)
            while not go.wait(2):  # s; after 10 without a byte, main.py gives up
                outputfile.write(source.read(1))
            super().copyfile(source, outputfile)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer((address, 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://{address}:{server.server_port}", requests, go
        finally:
            go.set()
            server.shutdown()


@pytest.mark.usefixtures("nothing_left")
def test_slow_download(jobs, archive, tmp_path):
    """It meets no timeout: nobody is in the process group yet.

    A node downloads to a disk of its own; to a folder that nodes share, rank 0 does.
    """
    machine = jobs.cluster.address(socket.gethostname())
    flags = [*SMALL, "--nodelist=node[1-2]"]
    job = ["multi_node", *flags, *TWO_EACH, "job.sh", *ONE_EPOCH]
    salloc = ["salloc", *flags, *ONE_EACH, "srun", "uv", "run", "python", "main.py"]
    salloc += [*ONE_EPOCH, "--data-dir", tmp_path / "data"]
    with (
        ThreadPoolExecutor() as pool,
        serve_slowly(archive, machine) as (url, requests, go),
    ):
        env = {"CIFAR10_ARCHIVE": "", "CIFAR10_URL": f"{url}/sbatch"}
        four = pool.submit(jobs.sbatch, *job, MASTER_PORT="23457", **env)
        env |= {"CIFAR10_URL": f"{url}/salloc"}
        two = pool.submit(jobs.run, salloc, "multi_node", MASTER_PORT="23458", **env)
        downloads = sorted(requests.get(timeout=300) for _ in range(3))
        assert downloads == ["/salloc", "/sbatch", "/sbatch"]
        # Rank 0 listens there from the moment when it joins.
        for port in (23457, 23458):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((jobs.cluster.address("node1"), port))
        go.set()
        four.result().trained(4, batch_size=4)
        two.result().trained(2, batch_size=4)
        assert requests.empty()
