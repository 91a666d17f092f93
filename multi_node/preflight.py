"""Look at the nodes of a job before a long training: what each rank has there, and what is wrong."""

import argparse
import faulthandler
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

os.environ["TORCH_CPP_LOG_LEVEL"] = (
    "FATAL"  # c10d takes pages for what is said here in a line
)
os.environ.setdefault("NCCL_DEBUG", "WARN")  # or NCCL does not say what is wrong
os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")  # as in job.sh

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

MEBIBYTES = 64  # that the ranks sum up, and that one rank of each node writes and reads
BY_ADDRESS = "MASTER_ADDR=$(hostname -I | cut -d' ' -f1)"
env = os.environ
node = env.get("SLURMD_NODENAME", socket.gethostname())
problems: list[
    tuple[str, str]
] = []  # of this rank: what is wrong, and the line of job.sh that mends it


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="srun uv run python %(prog)s [options]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--data-dir",
        type=Path,
        default=env.get("SLURM_TMPDIR", "/tmp"),
        help="folder that the data goes to",
    )
    add("--data-gb", type=float, default=1.0, help="room that the data takes there")
    add("--cpu", action="store_true", help="to train on the CPU: do not miss any GPU")
    add(
        "--timeout",
        type=int,
        default=30,
        help="seconds to wait for the other ranks, and for the disk",
    )
    args = parser.parse_args()
    faulthandler.dump_traceback_later(
        10 * args.timeout, exit=True
    )  # a dead disk or driver holds it for ever
    rank, local_rank, world_size, ranks_here = read_numbers()
    me = {"rank": rank, "node": node, "of": world_size, "problems": problems}
    me |= look_at_gpu(local_rank, ranks_here, args.cpu)
    me |= look_at_cpus(me["bus"]) | look_at_network(
        several_nodes=world_size > ranks_here
    )
    if local_rank == 0:
        me |= look_at_node() | look_at_disk(
            args.data_dir.absolute(), args.data_gb, args.timeout
        )
    try:
        store, me["address"] = within(
            args.timeout, join, rank, world_size, args.timeout
        )
        interface = rf"(?m)^\d+: (\S+) +inet6? {re.escape(me['address'])}/"
        me["interface"] = (
            re.findall(interface, subprocess.getoutput("ip -o address")) or ["?"]
        )[0]
        store.set(f"came {rank}", json.dumps(me))
        if rank == 0:
            everyone = last = gather(store, "came", world_size, args.timeout)
            gpus = {(one["node"], one["id"]) for one in everyone.values() if one["bus"]}
            backend = (
                "nccl" if len(gpus) == world_size else "gloo"
            )  # NCCL refuses two ranks on one GPU
            store.set("backend", backend if len(everyone) == world_size else "none")
        backend = store.get("backend").decode()
    except (OSError, RuntimeError, ValueError) as error:
        problems.append(why_alone(error, rank, world_size))
        if rank == 0:
            report([me], lost=[], backend="none")
        else:
            sys.stderr.write(
                "".join(
                    f"preflight.py: {node}: {what}: {mend}\n" for what, mend in problems
                )
            )
        # The end of a rank may be that of the others (--kill-on-bad-exit), who have something to say, too.
        leave(1, seconds=5 if rank else args.timeout + 10)
    if backend != "none":
        try:
            me["seconds"] = within(
                args.timeout, sum_up, backend, store, rank, local_rank, world_size
            )
        except (OSError, RuntimeError) as error:
            mend = f"export {backend.upper()}_SOCKET_IFNAME={me['interface']}"
            problems.append((f"the all-reduce failed: {reason_of(error)}", mend))
        store.set(f"summed {rank}", json.dumps(me))
        if rank == 0:
            last = gather(store, "summed", world_size, args.timeout + 5)
    if rank == 0:
        lost = [rank for rank in range(world_size) if rank not in last]
        leave(
            report(list((everyone | last).values()), lost, backend),
            seconds=5 if lost else 0,
        )
    leave(0)


def read_numbers() -> tuple[int, int, int, int]:
    """Return rank, local rank, world size and the number of ranks on a node, as srun or torchrun has them."""
    if "RANK" not in env and env.get("SLURM_STEP_NUM_TASKS", "none") != env.get(
        "SLURM_NTASKS"
    ):
        sys.exit(
            "preflight.py: error: this is no task of a job: use srun uv run python preflight.py"
        )
    of_torchrun = {
        "RANK": "SLURM_PROCID",
        "LOCAL_RANK": "SLURM_LOCALID",
        "WORLD_SIZE": "SLURM_NTASKS",
    }
    numbers = (
        int(env.get(name) or env[slurms]) for name, slurms in of_torchrun.items()
    )
    on_nodes = env.get("SLURM_STEP_TASKS_PER_NODE", "1").split(",")  # such as 4(x2),3
    return *numbers, int(
        env.get("LOCAL_WORLD_SIZE") or max(int(on.split("(")[0]) for on in on_nodes)
    )


def look_at_gpu(local_rank: int, ranks_here: int, cpu: bool) -> dict:
    """Return the GPU of this rank."""
    given, seen = int(env.get("SLURM_GPUS_ON_NODE", "0")), torch.cuda.device_count()
    gpus, mend = seen or given, f"#SBATCH --gpus-per-node={ranks_here}"
    found = {"GPU": f"0 of {given} seen", "id": local_rank if given else "", "bus": ""}
    driver = Path("/proc/driver/nvidia/version").exists()
    named = env.get("CUDA_VISIBLE_DEVICES")
    visible = seen or (named.count(",") + 1 if named else given)
    if "SLURM_GPUS_PER_TASK" in env or "per_task" in env.get("SLURM_TRES_BIND", ""):
        what = "--gpus-per-task hides the GPUs of a node from one another, and NCCL needs to see them"
        problems.append((what, f"{mend}, and no --gpus-per-task"))
    elif visible < given and ranks_here > 1:
        what = f"a rank sees {visible} of the job's {given} GPUs of its node, and NCCL needs to see them all"
        problems.append(
            (
                what,
                "unset CUDA_VISIBLE_DEVICES SLURM_GPU_BIND SLURM_TRES_BIND; no --gpu-bind",
            )
        )
    elif local_rank >= gpus and (gpus or (driver and not cpu)):
        what = (
            f"{ranks_here} ranks share the GPUs of a node, of which the job has {gpus}"
        )
        problems.append((what if gpus else f"the job has no GPU on {node}", mend))
    elif given and not seen and not driver and not cpu:
        what = f"{node} has no NVIDIA driver, and the job has {given} of its GPUs"
        problems.append((what, f"#SBATCH --exclude={node}"))
    elif driver and (seen or not cpu):
        try:
            torch.cuda.init()  # it says what is wrong
            torch.cuda.set_device(local_rank)
            torch.ones(
                1, device="cuda"
            ).item()  # it computes, which init() does not try
            gpu = torch.cuda.get_device_properties(local_rank)
            free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
            bus = "unknown"  # to PyTorch 2.7
            if hasattr(gpu, "pci_bus_id"):
                bus = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        except (
            RuntimeError,
            AssertionError,
            AttributeError,
            torch.cuda.DeferredCudaCallError,
        ) as error:
            reason = reason_of(error)
            everywhere = re.search("too old|not compiled|no kernel image", reason)
            mend = (
                "install a PyTorch that fits GPU and driver"
                if everywhere
                else f"#SBATCH --exclude={node}"
            )
            problems.append((f"PyTorch cannot use the GPU: {reason}", mend))
            return found
        found = {"id": str(gpu.uuid), "bus": bus}
        found["GPU"] = (
            f"{local_rank} of {seen}: {gpu.name}, {free:.0f} of {total:.0f} GiB free"
        )
    return found


def look_at_cpus(bus: str) -> dict:
    """Return the CPUs that this rank may use, and their NUMA distance from the GPU at this PCI address."""
    mine = os.sched_getaffinity(0)
    quotas = [text.split() for text in cgroup("cpu", "cpu.max")]
    quotas += zip(
        cgroup("cpu", "cpu.cfs_quota_us"),
        cgroup("cpu", "cpu.cfs_period_us"),
        strict=False,
    )
    limits = [
        int(quota) / int(period) for quota, period in quotas if quota.isdecimal()
    ]  # or max, or -1
    cpus = min([len(mine), *limits]) / int(
        env.get("LOCAL_WORLD_SIZE", "1")
    )  # torchrun's processes share
    asked = (
        int(env.get("SLURM_CPUS_PER_TASK", "0")) if "LOCAL_WORLD_SIZE" not in env else 0
    )
    if asked > cpus:
        bound = (
            "SRUN_CPUS_PER_TASK" in env
        )  # the other reason; or srun 22.05 or 23.02 gives a task one CPU
        mend = (
            "export SLURM_CPU_BIND=none"
            if bound
            else "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"
        )
        problems.append(
            (f"a rank can use {cpus:g} of the {asked} CPUs that the job asks for", mend)
        )
    elif not asked and cpus < 2:
        problems.append(
            (
                f"a rank can use {cpus:g} CPU for all it does",
                "#SBATCH --cpus-per-task=4",
            )
        )
    near = read(f"/sys/bus/pci/devices/{bus}/numa_node")
    online = sorted(
        Path("/sys/devices/system/node").glob("node[0-9]*"),
        key=lambda path: int(path.name[4:]),
    )
    row = read(
        f"/sys/devices/system/node/node{near}/distance"
    ).split()  # from there to each that is online
    names = {f"cpu{number}" for number in mine}
    far = {
        step
        for step, path in zip(row, online, strict=False)
        if names & set(os.listdir(path))
    }
    which = re.search(r"Cpus_allowed_list:\s*(\S+)", read("/proc/self/status"))[1]
    return {
        "CPUs": f"{cpus:g} ({which})",
        "NUMA distance": ", ".join(sorted(far)) or "-",
    }


def look_at_node() -> dict:
    """Return the memory that the job may use here, and the versions of what it runs on."""
    limits = [
        *cgroup("memory", "memory.max"),
        *cgroup("memory", "memory.limit_in_bytes"),
    ]
    sizes = [int(limit) for limit in limits if limit.isdecimal()]
    sizes.append(int(env.get("SLURM_MEM_PER_NODE", "0")) * 2**20)
    sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    driver = re.search(r"\s(\d+\.[\d.]+)", read("/proc/driver/nvidia/version")) or [
        "",
        "none",
    ]
    nccl = (
        ".".join(map(str, torch.cuda.nccl.version()))
        if dist.is_nccl_available()
        else "none"
    )
    slurm = (
        subprocess.getoutput("scontrol --version 2>/dev/null").split() or ["none"]
    )[-1]
    versions = (
        f"CUDA {torch.version.cuda}, NCCL {nccl}, driver {driver[1]}, Slurm {slurm}"
    )
    memory = f"{min(size for size in sizes if size) / 2**30:.0f} GiB"
    return {"memory": memory, "versions": f"torch {torch.__version__}, {versions}"}


def look_at_disk(folder: Path, data_gb: float, timeout: int) -> dict:
    """Return the room in the data folder, and its speed."""
    found, mend = (
        {"data folder": str(folder)},
        "export SLURM_TMPDIR=/a/folder/with/room/$SLURM_JOB_ID",
    )
    try:
        while not folder.exists():  # job.sh makes it
            folder = folder.parent
        disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize / 1e9
        found["free"] = f"{free:.1f} GB"
        if free < data_gb:
            problems.append((f"{folder} has {free:.1f} GB free, not {data_gb:g}", mend))
        else:
            found |= within(timeout, time_disk, folder)
    except OSError as error:
        problems.append((f"{folder} cannot be used: {reason_of(error)}", mend))
    return found


def time_disk(folder: Path) -> dict:
    """Return the speed at which a file is written to disk, and read from there."""
    size, block = MEBIBYTES * 2**20 / 1e9, os.urandom(2**20)
    with tempfile.TemporaryFile(
        dir=folder
    ) as file:  # has no name, so that nothing can be left of it
        start = time.perf_counter()
        for _ in range(MEBIBYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        os.posix_fadvise(
            file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED
        )  # or it would be read from memory
        file.seek(0)
        while file.read(2**20):
            pass
        speeds = size / (written - start), size / (time.perf_counter() - written)
    return {"written": f"{speeds[0]:.2f} GB/s", "read": f"{speeds[1]:.2f} GB/s"}


def look_at_network(several_nodes: bool) -> dict:
    """Choose where the ranks meet, as main.py does, and return the address that this is here."""
    if "MASTER_ADDR" not in env and "SLURM_STEP_NODELIST" in env:
        command = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
        env["MASTER_ADDR"] = subprocess.check_output(command, text=True).split()[0]
    host, job = (
        env.setdefault("MASTER_ADDR", "127.0.0.1"),
        int(env.get("SLURM_JOB_ID", "0")),
    )
    env.setdefault("MASTER_PORT", str(job and 10000 + job % 20000))
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]
    except OSError as error:
        address = reason_of(error)
    if several_nodes and (address.startswith("127.") or address == "::1"):
        problems.append(
            (
                f"{host} is {address} on {node}, where no other node can reach it",
                BY_ADDRESS,
            )
        )
    return {"MASTER_ADDR": f"{host}: {address}"}


def join(rank: int, world_size: int, timeout: int) -> tuple[dist.Store, str]:
    """Return the store in which the ranks leave messages, and the address from which this rank reaches it."""
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    family, *_, address = socket.getaddrinfo(host, port)[0]
    serve = (
        rank == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in env
    )  # torchrun serves it by itself
    if serve:  # c10d would not say so plainly if the port is taken
        socket.create_server(address, family=family).close()
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(host, port, world_size, serve, limit, wait_for_workers=False)
    store.set_timeout(2 * limit)  # rank 0 may wait for others
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: the kernel chooses the way
        return store, probe.getsockname()[0]


def why_alone(error: Exception, rank: int, world_size: int) -> tuple[str, str]:
    """Return why this rank meets no other, and what mends it."""
    port, reason = env["MASTER_PORT"], reason_of(error)
    if "in use" in reason:
        with socket.create_server(("", 0)) as free:
            mend = f"export MASTER_PORT={free.getsockname()[1]}"
        return f"another process has taken MASTER_PORT={port} of {node}", mend
    what = f"rank {rank} of {world_size} finds no others at MASTER_ADDR={env['MASTER_ADDR']}, MASTER_PORT={port}"
    unknown = (
        isinstance(error, socket.gaierror) or "assign" in reason
    )  # no address of rank 0's node
    return (
        f"{what}: {reason}",
        BY_ADDRESS if unknown else "see what the others say, or ask about a firewall",
    )


def gather(
    store: dist.Store, moment: str, world_size: int, timeout: int
) -> dict[int, dict]:
    """Return what each rank has left in the store; of some, there may be nothing."""
    keys = {rank: f"{moment} {rank}" for rank in range(world_size)}
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout))
    except RuntimeError:
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    return {rank: json.loads(store.get(key)) for rank, key in keys.items()}


def sum_up(
    backend: str, store: dist.Store, rank: int, local_rank: int, world_size: int
) -> float:
    """Sum numbers over all ranks, check the sums and return the seconds that it took."""
    gpu = torch.device("cuda", local_rank) if backend == "nccl" else None
    if gpu:
        torch.cuda.set_device(gpu)  # a thread starts with GPU 0
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, device_id=gpu
    )
    numbers = torch.full((MEBIBYTES * 2**18,), rank + 1.0, device=gpu or "cpu")
    dist.all_reduce(numbers.clone())  # the first one opens connections
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(numbers)
    if gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    wrong = int((numbers != world_size * (world_size + 1) / 2).sum())
    if wrong:
        problems.append(
            (
                f"{wrong} sums of an all-reduce are wrong on {node}",
                f"#SBATCH --exclude={node}",
            )
        )
    dist.barrier()
    dist.destroy_process_group()
    return seconds


def compare(ranks: list[dict], lost: list[int]) -> dict[tuple[str, str], list[int]]:
    """Return what is wrong and what mends it, with the ranks for which it is wrong."""
    wrong, users = defaultdict(list), defaultdict(list)
    for one in ranks:
        users[one["node"], one["id"]].append(one["rank"])
        for what, mend in one["problems"]:
            wrong[what, mend].append(one["rank"])
    for (name, gpu), who in users.items():
        if len(who) > 1 and gpu != "":
            wrong[
                f"{len(who)} ranks use one GPU of {name}",
                "unset LOCAL_RANK CUDA_VISIBLE_DEVICES",
            ] = who
    if len({one["MASTER_ADDR"] for one in ranks}) > 1 and not any(
        mend == BY_ADDRESS for _, mend in wrong
    ):
        wrong[f"{env['MASTER_ADDR']} is not one address on all nodes", BY_ADDRESS] = (
            list(range(len(ranks)))
        )
    if lost:
        wrong[
            "these ranks did not come, or were lost", "see what they say themselves"
        ] = lost
    return wrong


def report(ranks: list[dict], lost: list[int], backend: str) -> bool:
    """Print what the ranks have found; return whether something is wrong."""
    # In a file, rich would take the width from COLUMNS.
    console = Console(
        width=None if sys.stdout.isatty() else 80,
        markup=False,
        highlight=False,
        emoji=False,
    )
    nodes = [one for one in ranks if "data folder" in one]
    versions = {one["versions"]: one["node"] for one in nodes}
    for text, name in versions.items():
        console.print(f"{name}: {text}" if len(versions) > 1 else text)
    for rows, keys in (
        (ranks, ["rank", "node", "GPU", "CPUs", "NUMA distance"]),
        (nodes, ["node", "memory", "address", "interface", "MASTER_ADDR"]),
        (nodes, ["node", "data folder", "free", "written", "read"]),
    ):
        table = Table(*keys, box=None, pad_edge=False)
        for one in rows:
            table.add_row(*(str(one.get(key, "-")) for key in keys))
        console.print("", table)
    console.print()
    if seconds := max(one.get("seconds", 0) for one in ranks):
        rate = (
            MEBIBYTES * 2**20 / 1e9 * 2 * (len(ranks) - 1) / len(ranks) / seconds
        )  # nccl-tests' busbw
        text = f"all-reduce of {MEBIBYTES} MiB over {len(ranks)} ranks with {backend}"
        console.print(f"{text}: {seconds:.3f} s, {rate:.2f} GB/s, checked")
    if not any(one["bus"] for one in ranks):
        console.print("warning: no GPU found: main.py would train on the CPU")
    wrong = compare(ranks, lost)
    for (what, mend), who in wrong.items():
        which = (
            "all ranks"
            if len(who) == ranks[0]["of"]
            else f"rank {', '.join(map(str, who))}"
        )
        console.print(f"problem: {what} ({which})")
        console.print(f"    mend: {mend}", soft_wrap=True)  # in one piece, to be copied
    console.print(f"problems: {len(wrong)}")
    return bool(wrong)


def reason_of(error: Exception) -> str:
    """Return the first line of what an error says; that of `within` says nothing."""
    return str(error).partition("\n")[0] or "no answer in time"


def within(seconds: float, function, *arguments):
    """Return what a function returns, or raise TimeoutError: not every call that may hang has a timeout."""
    return ThreadPoolExecutor(1).submit(function, *arguments).result(seconds)


def leave(status: int, seconds: float = 0) -> None:
    """End this process after some seconds, with all calls in it that hang."""
    sys.stdout.flush()
    time.sleep(seconds)
    os._exit(status)


def read(path: str | Path) -> str:
    """Return the text of a file, or nothing where there is none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def cgroup(controller: str, name: str) -> list[str]:
    """Return the contents of a file in each control group that this process is in, of version 1 and 2."""
    texts = []
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") or not controllers:
            group = Path("/sys/fs/cgroup", controllers, path[1:])
            texts += [read(folder / name) for folder in (group, *group.parents)]
    return [text for text in texts if text]


if __name__ == "__main__":
    main()
