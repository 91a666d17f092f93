"""Look at the nodes of a job before a long training, and say what is wrong.

In a job or an allocation: srun uv run --no-sync python ../docs/preflight/preflight.py
"""

import argparse
import faulthandler
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from os import environ

# Before PyTorch is imported, which reads them. job.sh's, or yours, stay.
environ.setdefault("NCCL_DEBUG", "WARN")
environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # one line here is pages in c10d
environ.setdefault("TORCH_DIST_USE_NCCL2", "0")  # as in main.py

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

MEBIBYTES = 64  # that the ranks sum up, and that one rank of a node writes and reads
GIGABYTES = MEBIBYTES * 2**20 / 1e9
NODE = environ.get("SLURMD_NODENAME", socket.gethostname())
# What this rank finds, in a line each, with the fix.
problems: list[str] = []
warnings: list[str] = []


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="%(prog)s [options]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    data_dir = environ.get("LOCAL_JOB_DIR") or environ.get("SLURM_TMPDIR", "/tmp")
    add = parser.add_argument
    add("--data-dir", default=data_dir, help="folder that the data goes to")
    add("--data-gb", type=float, default=1.0, help="room that the data takes there")
    add("--cpu", action="store_true", help="to train on the CPU: miss no GPU")
    add("--timeout", type=int, default=120, help="seconds to wait for the other ranks")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    check_task()
    set_ranks()
    # A dead disk or driver may hold a rank. This ends it, and prints where it was.
    faulthandler.dump_traceback_later(5 * args.timeout, exit=True)
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    mine = {"rank": rank, "node": NODE, "problem": problems, "warning": warnings}
    mine |= look_at_gpu(int(environ["LOCAL_RANK"]), args.cpu)
    mine["CPUs"] = look_at_cpus()
    if environ["LOCAL_RANK"] == "0":
        mine |= look_at_disk(args.data_dir, args.data_gb)
    try:
        store = join(rank, args.timeout)
    except Exception as error:  # of several kinds
        problems.append(
            f"{NODE} cannot join the others at "
            f"MASTER_ADDR={environ.get('MASTER_ADDR')}, "
            f"MASTER_PORT={environ.get('MASTER_PORT')}: is that rank 0's node, the "
            "port free there, and open between nodes (no firewall)? "
            f"{reason_of(error)}"
        )
        print_notes("problem", [mine])
        leave(1)
    store.set(f"came {rank}", json.dumps(mine))
    reports = gather(store, "came", world_size)
    if all("device" in report for report in reports):
        mine |= try_all_reduce(store, reports, rank, args.timeout)
    # With CUDA and NCCL up. What ranks share, such as libraries, is divided by them:
    # the sum over the ranks is then the memory that the node really needs.
    kibibytes = read_own("smaps_rollup", "Pss").removesuffix(" kB")
    mine["memory (GiB)"] = round(int(kibibytes) / 2**20, 1)
    store.set(f"done {rank}", json.dumps(mine))
    found = 0
    if rank == 0:
        found = print_report(gather(store, "done", world_size))
    leave(1 if found else 0)


def check_task() -> None:
    """Refuse to start without srun: on a login node, or without the other tasks."""
    if "SLURM_JOB_ID" not in environ or "TORCHELASTIC_RUN_ID" in environ:
        return
    if environ.get("SLURM_STEP_NUM_TASKS") != environ.get("SLURM_NTASKS", "1"):
        sys.exit(
            "preflight.py: error: this is no task of the job: "
            "start preflight.py with srun"
        )


def set_ranks() -> None:
    """Set torchrun's variables from srun's, whatever a shell has left in them."""
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun has set them
        return
    environ["RANK"] = environ.get("SLURM_PROCID", "0")
    environ["LOCAL_RANK"] = environ.get("SLURM_LOCALID", "0")
    environ["WORLD_SIZE"] = environ.get("SLURM_NTASKS", "1")


def look_at_gpu(local_rank: int, cpu: bool) -> dict:
    """Return the device that main.py takes, after computing on it."""
    visible = torch.cuda.device_count()
    gpus = int(environ.get("SLURM_GPUS_ON_NODE", visible))  # the job's
    one_only = "," not in (environ.get("CUDA_VISIBLE_DEVICES") or ",")
    found = {"device": "cpu", "GPU": f"none of {gpus}"}
    if 0 < gpus <= local_rank:
        problems.append(
            f"a rank has no GPU to itself: the job has {gpus} on its node; "
            "ask for more --gpus-per-node, or for fewer tasks"
        )
        return found
    if one_only and gpus > 1:
        warnings.append(
            "a task sees only one GPU of its node, and NCCL cannot use the direct "
            "way between them: ask for --gpus-per-node, not --gpus-per-task"
        )
    if visible == 0 and cpu:
        warnings.append("no GPU found: main.py would train on the CPU")
        return found
    if not torch.version.cuda and not torch.version.hip:
        problems.append("this PyTorch is for CPUs only: install one for GPUs, or --cpu")
        return found
    try:
        device = torch.device("cuda", local_rank % max(1, visible))
        torch.ones(1, device=device).item()
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
    except Exception as error:  # of several kinds, one for each thing that is missing
        problems.append(
            f"PyTorch cannot use a GPU of {NODE}, where the job has {gpus}: "
            f"{reason_of(error)}: ask for --gpus-per-node, start a container with "
            f"--nv, or, if only this node fails, --exclude={NODE}"
        )
        return found
    room = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    return {
        "device": str(device),
        "GPU": f"{device.index} of {visible}: {name}, {room}",
    }


def look_at_cpus() -> str:
    """Return the number of CPUs that this rank may use, and which these are."""
    cpus = len(os.sched_getaffinity(0))
    asked = environ.get("SLURM_CPUS_PER_TASK", "1")
    if cpus < int(asked):
        problems.append(
            f"a rank may use {cpus} of the {asked} CPUs that it asks for: "
            "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"
        )
    return f"{cpus} ({read_own('status', 'Cpus_allowed_list')})"


def look_at_disk(folder: str, data_gb: float) -> dict:
    """Return the room in the data folder, and its speed."""
    found = {"data folder": folder}
    try:
        free = shutil.disk_usage(folder).free / 1e9
        found["free"] = f"{free:.1f} GB"
        if free < data_gb:
            raise OSError(f"{free:.1f} GB free, not {data_gb:g}")
        found |= time_disk(folder)
    except OSError as error:
        problems.append(f"{folder}: {error}: name another local_disk in job.sh")
    return found


def time_disk(folder: str) -> dict:
    """Return how fast a file is written to disk, and how fast it is read from there."""
    block = os.urandom(2**20)
    # The file has no name: nothing is left of it, however this process ends.
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(MEBIBYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = GIGABYTES / (time.perf_counter() - start)
        # Without this, it would be read from memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(2**20):
            pass
        read = GIGABYTES / (time.perf_counter() - start)
    return {"written": f"{written:.2f} GB/s", "read": f"{read:.2f} GB/s"}


def join(rank: int, timeout: int) -> dist.Store:
    """Return the store in which ranks leave what the others read. Rank 0 serves it."""
    # As in main.py: job.sh sets both, salloc neither.
    if "MASTER_ADDR" not in environ:
        environ["MASTER_ADDR"] = find_first_node()
    job = int(environ.get("SLURM_JOB_ID", "0"))
    environ.setdefault("MASTER_PORT", str(10000 + job % 20000 if job else 0))
    serves = rank == 0 and "TORCHELASTIC_RUN_ID" not in environ  # torchrun does
    # It does not wait for the others: the report says which are missing.
    return dist.TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=serves,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )


def find_first_node() -> str:
    """Return the first node of this step, which may have fewer than its job."""
    if "SLURM_STEP_NODELIST" not in environ:
        return "127.0.0.1"
    return expand(environ["SLURM_STEP_NODELIST"])[0]


def gather(store: dist.Store, moment: str, world_size: int) -> list[dict]:
    """Return what each rank has left in the store, or that it has left nothing."""
    keys = [f"{moment} {rank}" for rank in range(world_size)]
    with suppress(RuntimeError):  # after the timeout
        store.wait(keys)
    reports = []
    for rank, key in enumerate(keys):
        if store.check([key]):
            reports.append(json.loads(store.get(key)))
        else:
            lost = (
                f"it did not come to MASTER_ADDR={environ['MASTER_ADDR']}, "
                f"MASTER_PORT={environ['MASTER_PORT']}: is the port open between nodes "
                "(no firewall)? Or it is slow (--timeout), or lost: see what it says"
            )
            reports.append({"rank": rank, "problem": [lost], "warning": []})
    return reports


def try_all_reduce(
    store: dist.Store, reports: list[dict], rank: int, timeout: int
) -> dict:
    """Return how fast the ranks sum up numbers, on their GPUs if all have one."""
    devices = [report["device"] for report in reports]
    backend, device = "nccl", torch.device(devices[rank])
    if "cpu" in devices:
        backend, device = "gloo", torch.device("cpu", 0)
    # NCCL and gloo may wait for many minutes. Then this thread goes on alone.
    thread = ThreadPoolExecutor(1)
    call = thread.submit(sum_up, store, backend, device, rank, len(reports))
    try:
        return {"all-reduce": call.result(timeout)}
    except (OSError, RuntimeError) as error:
        problems.append(
            f"an all-reduce with {backend} fails: {reason_of(error)}: "
            "see 'The wrong network interface' in docs/first_aid/ranks.rst"
        )
        return {}


def sum_up(
    store: dist.Store, backend: str, device: torch.device, rank: int, world_size: int
) -> str:
    """Sum up numbers over all ranks, check the sums, and return how fast it was."""
    options = {}
    if backend == "nccl":
        torch.cuda.set_device(device)  # of this thread
        options = {"device_id": device}
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, **options
    )
    numbers = torch.full((MEBIBYTES * 2**18,), rank + 1.0, device=device)
    dist.all_reduce(numbers.clone())  # the first one opens the connections
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(numbers)
    numbers[0].item()  # waits for the GPU
    seconds = time.perf_counter() - start
    if (numbers != world_size * (world_size + 1) / 2).any():
        problems.append(f"an all-reduce is wrong on {NODE}: --exclude={NODE}")
    dist.barrier()
    # What nccl-tests call busbw. It does not depend on the number of ranks.
    rate = GIGABYTES * 2 * (world_size - 1) / world_size / seconds
    return (
        f"all-reduce of {MEBIBYTES} MiB over {world_size} ranks with {backend}: "
        f"{seconds:.3f} s, {rate:.2f} GB/s, checked"
    )


def print_report(reports: list[dict]) -> int:
    """Print what the ranks have found, and return the number of problems."""
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}\n")
    print_table(["rank", "node", "GPU", "CPUs", "memory (GiB)"], reports)
    columns = ["node", "memory (GiB)", "of the job's"]
    columns += ["data folder", "free", "written", "read"]
    print_table(columns, add_up_memory(reports))
    print(reports[0].get("all-reduce", "no all-reduce"))
    print_notes("warning", reports)
    found = print_notes("problem", reports)
    print(f"problems: {found}")
    return found


def add_up_memory(reports: list[dict]) -> list[dict]:
    """Return a report of each node: its ranks' memory, and what the job has there."""
    limits = find_job_memory()
    nodes = []
    for report in reports:
        if "data folder" not in report:
            continue
        node = report["node"]
        ranks = [other for other in reports if other.get("node") == node]
        memory = round(sum(rank["memory (GiB)"] for rank in ranks), 1)
        row = report | {"memory (GiB)": memory}
        if node in limits:
            row["of the job's"] = limits[node]
            if memory > limits[node]:
                report["problem"].append(
                    f"the ranks on {node} take {memory} GiB before they train, "
                    f"and the job has {limits[node]} there: ask for more --mem"
                )
        nodes.append(row)
    return nodes


def find_job_memory() -> dict[str, float]:
    """Return the GiB of memory that the job has on each of its nodes."""
    job = environ.get("SLURM_JOB_ID")
    # Unlike SLURM_MEM_PER_NODE, it also knows what --mem-per-cpu and --mem=0 come to.
    text = subprocess.getoutput(f"scontrol show job --details {job}")
    memory = {}
    # A Slurm that does not count memory says 0.
    for nodes, mebibytes in re.findall(r"\n +Nodes=(\S+) .* Mem=([1-9]\d*)", text):
        for node in expand(nodes):
            memory[node] = round(int(mebibytes) / 2**10, 1)
    return memory


def print_table(columns: list[str], rows: list[dict]) -> None:
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))  # right of each column
    for row in rows:
        table.add_row(*(str(row.get(column, "-")) for column in columns))
    # So wide that no name is folded: in a file, rich would take 80 columns.
    Console(width=160, highlight=False, markup=False).print(table, "")


def print_notes(kind: str, reports: list[dict]) -> int:
    """Print each problem or warning once, with its ranks, and return how many."""
    ranks = defaultdict(list)
    for report in reports:
        for note in report[kind]:
            ranks[note].append(str(report["rank"]))
    for note, whose in ranks.items():
        who = "rank " + ", ".join(whose)
        if len(whose) == int(environ["WORLD_SIZE"]):
            who = "all ranks"
        print(f"{kind} ({who}): {note}")
    return len(ranks)


def read_own(name: str, field: str) -> str:
    """Return a field of one of the files in which Linux describes this process."""
    with open(f"/proc/self/{name}") as file:
        return re.search(rf"\n{field}:\s+(.*)", file.read())[1]


def expand(host_list: str) -> list[str]:
    """Return the names in a host list, such as node[1-2]."""
    command = ["scontrol", "show", "hostnames", host_list]
    return subprocess.check_output(command, text=True).split()


def reason_of(error: Exception) -> str:
    """Return the first line of an error. A timeout has none."""
    return str(error).partition("\n")[0] or "no answer in time"


def leave(status: int) -> None:
    """End this process, and all calls in it that hang."""
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
