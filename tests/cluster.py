#!/usr/bin/env python3
"""A real Slurm cluster on this machine, to try job scripts on.

It needs root, Slurm, munge and iproute2.

One slurmctld and several slurmd, each a host of its own: its own network, host name,
/etc (a copy with its own hosts), /tmp and processes (Linux namespaces), joined by a
bridge. GPUs are generic resources without hardware behind them, and the nodes claim
more CPUs and memory than this machine has. Nothing of it outlives its supervisor
process, and the machine's own /etc and munge are left alone.

Slurm is the installed one, or another that some release of Debian has: debootstrap puts
that release into /var/tmp the first time, and its /usr takes the place of the machine's
on the cluster's hosts.

Start a cluster, which sbatch and srun in this shell then mean; look into a node; stop
it, and let this shell forget it, where squeue would look for it for a minute. Called
again in another shell, `up` starts none, and prints the line for the one that runs:

    eval "$(python3 tests/cluster.py up --nodes 2 --gpus 4)"
    (cd multi_node && sbatch job.sh)
    python3 tests/cluster.py exec node1 ps ax
    eval "$(python3 tests/cluster.py down)"

Another Slurm:

    eval "$(python3 tests/cluster.py up --slurm 24.11 --proctrack cgroup)"
"""

import argparse
import json
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# Not /run or /tmp: Slurm executes job scripts from here, and nodes have their own /tmp.
PARENT = Path("/var/tmp")
PREFIX = "slurm-cluster-"
PROGRAMS = "slurmctld slurmd sbatch munged ip unshare nsenter setpriv".split()
# Control groups of version 1: for their processes, and for what these may use.
FREEZER = Path("/sys/fs/cgroup/freezer")
MEMORY = Path("/sys/fs/cgroup/memory")
START_SECONDS = 60
# Debian's, by the Slurm that they have.
RELEASES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}
PROCTRACK = ["linuxproc", "cgroup"]
PACKAGES = "slurmctld slurmd slurm-client munge iproute2 procps git".split()
PACKAGES += "g++ openssl python3".split()  # torch.compile calls the first two
COMMANDS = "sacct salloc sbatch scancel scontrol sdiag sinfo squeue srun".split()

SLURM_CONF = """\
ClusterName=cluster
FirstJobId={first_job}
SlurmctldHost=controller({subnet}.2)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={state}/munge.socket,cred_expire=5
StateSaveLocation={state}/controller
SlurmctldPidFile={state}/slurmctld.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdSpoolDir={state}/spool-%n
SlurmdPidFile={state}/slurmd-%n.pid
SlurmdLogFile={state}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType={proctrack}
{task}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
MinJobAge=86400
KillWait=15
SchedulerParameters=sched_interval=1
SlurmdTimeout=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{scripts}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""

# The first process of a host: state, name, address, root and the daemon to run are its
# arguments. It waits on standard input for its network cable. All of /etc becomes a
# copy: a mount over /etc/hosts alone would go when the machine replaces that file. /tmp
# becomes a disk of the host's own, in which the folders that the machine has in /tmp
# stay visible: a clone of this repository may be among them. Control groups are the
# cluster's own, where they are used, and /usr is the one of `root`, if that is not the
# machine's.
HOST = """\
set -eu
state=$1 name=$2 address=$3 root=$4
shift 4
disk=$state/disk-$name
mkdir -p "$disk" # it is there if this host has crashed before
mount -t tmpfs -o mode=755 "$name" "$disk"
cp --archive /etc/. "$disk"
cp --remove-destination "$state/hosts" "$disk/hosts"
mount --move "$disk" /etc
read -r cable
hostname "$name"
ip link set lo up
ip address add "$address/24" dev eth0
ip link set eth0 up
mount -t tmpfs -o size=4g,mode=1777 "$name" "$disk"
for folder in /tmp/*/; do
    [ -d "$folder" ] || continue
    place=$disk/$(basename "$folder")
    mkdir "$place"
    # A folder may be gone since.
    mount --rbind "$folder" "$place" || { [ ! -d "$folder" ]; rmdir "$place"; }
done
mount --move "$disk" /tmp
mount -t tmpfs -o mode=1777 "$name" /dev/shm
for groups in /sys/fs/cgroup/freezer /sys/fs/cgroup/memory; do
    own=$groups/$(basename "$state")
    [ ! -d "$own" ] || mount --bind "$own" "$groups"
done
if [ "$root" != / ]; then
    mount --bind /usr/local "$root/usr/local"
    mount --rbind "$root/usr" /usr
fi
# A shell starts what runs in the background with SIGINT ignored, and Slurm 26.05 would
# hand that on to jobs.
env --default-signal "$@" >> "$state/$name.out" 2>&1 &
wait
"""


# One of Slurm's commands, as a user of the machine calls it. Where two clusters are up,
# a job of one calls the other's, and sh would lose the functions that it has exported.
COMMAND = """\
#!/bin/bash
PATH=${{PATH/"{state}/bin:"/}}
take_usr='mount --bind /usr/local "$0/usr/local" && mount --rbind "$0/usr" /usr'
exec unshare --mount bash -c "$take_usr"' && exec "$@"' {root} /usr/bin/{name} "$@"
"""


class ClusterError(Exception):
    """The cluster cannot be started or found; the message says why and what to do."""


def missing_requirements() -> str | None:
    """Say what this machine lacks to run a cluster, or return None."""
    if os.geteuid() != 0:
        return "a test cluster needs root, for its network namespaces"
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [program for program in PROGRAMS if not shutil.which(program, path=path)]
    if missing:
        debian = "slurmctld slurmd slurm-client munge iproute2"
        return f"not installed: {', '.join(missing)} (Debian: {debian})"
    return None


def root_of(slurm: str) -> Path:
    """Return the folder whose /usr has this Slurm; download it, the first time.

    It is `/` for the installed one.
    """
    if slurm == "installed":
        return Path("/")
    if sys.base_prefix == "/usr":
        raise ClusterError(
            "another Slurm brings its own /usr: use a Python outside, "
            "see `uv python install`"
        )
    root = PARENT / f"slurm-{slurm}"
    if not root.exists():
        if not shutil.which("debootstrap"):
            raise ClusterError(
                "not installed: debootstrap, which downloads other releases of Debian"
            )
        debian = "'Origin: Debian' 'Label: Debian' 'Created-By: Packages'"
        mirrors = run(f"apt-get indextargets --format '$(REPO_URI)' {debian}").split()
        if not mirrors:
            raise ClusterError(
                "apt's sources name no mirror of Debian to download another Slurm from"
            )
        half_done = Path(tempfile.mkdtemp(prefix=f"slurm-{slurm}-", dir=PARENT))
        half_done.chmod(0o755)
        try:
            run(
                f"debootstrap --variant=minbase --include={','.join(PACKAGES)} "
                f"{RELEASES[slurm]} {half_done} {mirrors[0]} "
                "/usr/share/debootstrap/scripts/sid"
            )
            half_done.rename(root)
        except OSError:
            if not root.exists():  # or other tests have made it meanwhile
                raise
        finally:
            shutil.rmtree(half_done, ignore_errors=True)
    return root


class Cluster:
    """A running cluster, as its users see it.

    `env` holds what Slurm's commands need to find it.
    """

    def __init__(self, state: Path):
        self.state = state
        self.env = {"SLURM_CONF": str(state / "slurm.conf")}
        if (state / "bin").exists():
            self.env["PATH"] = f"{state}/bin:{os.environ['PATH']}"

    @property
    def nodes(self) -> list[str]:
        return sorted(path.stem for path in self.state.glob("node*.pid"))

    def namespaces(self, node: str) -> list[str]:
        """Return the command that runs another command on a node."""
        pid_file = self.state / f"{node}.pid"
        if not pid_file.exists():
            raise ClusterError(f"no node {node}: there are {', '.join(self.nodes)}")
        # unshare(1) has put its child, and not itself, into the new process namespace.
        pid = pid_file.read_text()
        child = Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()
        command = f"nsenter --target {child} --net --uts --mount --pid --root"
        return command.split()

    def processes(self, node: str) -> list[str]:
        """Return the command lines of a node's processes, without Slurm's daemon."""
        command = [*self.namespaces(node), *"ps -ww -eo pid=,args=".split()]
        lines = subprocess.check_output(command, text=True).splitlines()
        own = (f"sh {self.state}", "slurmd -D", "ps -ww")
        commands = [line.split(maxsplit=1)[1] for line in lines]
        return [command for command in commands if not command.startswith(own)]

    def crash(self, host: str) -> None:
        """End a node, or `controller`, as a power cut does.

        Its processes, its network and its disk are gone.
        """
        self.end(host, signal.SIGKILL)

    def revive(self) -> None:
        """Start the hosts that have crashed; return when their daemons run."""
        done = self.state / "revived"
        done.unlink(missing_ok=True)
        os.kill(int((self.state / "supervisor.pid").read_text()), signal.SIGUSR1)
        deadline = time.monotonic() + START_SECONDS
        while not done.exists():
            if time.monotonic() > deadline:
                raise ClusterError("the hosts do not come back")
            time.sleep(0.05)

    def cable(self, node: str, state: str) -> None:
        """Plug a node's network cable in, or out: `state` is up or down."""
        switch = (self.state / "switch.pid").read_text()
        run(f"nsenter --target {switch} --net ip link set {node} {state}")

    def address(self, node: str) -> str:
        hosts = (self.state / "hosts").read_text()
        return re.search(rf"^(\S+) {node}$", hosts, re.MULTILINE)[1]

    def stop(self) -> None:
        """Stop the cluster; return when all of it is gone."""
        self.end("supervisor", signal.SIGTERM)

    def end(self, name: str, number: signal.Signals) -> None:
        """Signal one of its processes; return when that has ended."""
        with_pidfd = os.pidfd_open(int((self.state / f"{name}.pid").read_text()))
        signal.pidfd_send_signal(with_pidfd, number)
        select.select([with_pidfd], [], [])
        os.close(with_pidfd)


@dataclass
class Shape:
    """What a cluster is like."""

    nodes: int
    gpus: int  # a node
    cpus: int  # that a node claims to have
    slurm: str = "installed"  # or one of RELEASES
    proctrack: str = "linuxproc"  # one of PROCTRACK: how Slurm finds jobs' processes
    # What uses more than a job's --mem is killed. It takes proctrack "cgroup".
    limit_memory: bool = False
    # Slurm chooses a task's CPUs, as on most clusters. The first task of every node
    # then gets the same one of this machine's, and others may be idle.
    bind_tasks: bool = False
    # What a site adds: scripts that root runs on a node before a job and after it, and
    # one that the user runs before the batch script and before each task. What the last
    # one prints as `export NAME=value` or `unset NAME` changes their variables.
    prolog: str = ""
    epilog: str = ""
    task_prolog: str = ""
    topology: str = ""  # topology.conf: which nodes share a switch
    # A job has a /tmp of its own, which is gone when its extern step ends. It sees
    # nothing of the machine's /tmp.
    own_tmp: bool = False
    first_job: int = 1  # its number


def start(lifeline: int | None = None, **shape) -> tuple[Cluster, subprocess.Popen]:
    """Start a cluster and return it, and its supervisor, when every node is idle.

    `shape` has the fields of `Shape`. The cluster ends with `Cluster.stop`, and, if it
    is given a `lifeline`, when the other end of that pipe closes: when its owner is
    gone, however it went.
    """
    if reason := missing_requirements():
        raise ClusterError(reason)
    remove_leftovers()
    root = root_of(Shape(**shape).slurm)
    state = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PARENT))
    state.chmod(0o755)
    if lifeline is None:
        (state / "detached").touch()
    command = [sys.executable, __file__, "supervise", str(state), str(root)]
    command.append(json.dumps(shape))
    read_end, write_end = os.pipe()
    with (state / "supervisor.out").open("w") as log:
        supervisor = subprocess.Popen(
            [*command, str(write_end)],
            stdin=subprocess.DEVNULL if lifeline is None else lifeline,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[write_end],
        )
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        message = answer.read()  # until the supervisor is ready, or gone
    if message != "ready":
        supervisor.wait()
        raise ClusterError(message or "the cluster's supervisor died")
    return Cluster(state), supervisor


def running() -> list[Cluster]:
    """Return the clusters of this machine that `up` has started, and not a test run."""
    paths = sorted(path.parent for path in PARENT.glob(f"{PREFIX}*/detached"))
    return [Cluster(path) for path in paths if supervisor_is_alive(path)]


def supervisor_is_alive(state: Path) -> bool:
    try:
        pid = (state / "supervisor.pid").read_text()
        return str(state) in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def remove_leftovers() -> None:
    """Remove the folders of clusters whose supervisor was killed.

    The kernel has removed the rest of them.
    """
    for path in PARENT.glob(PREFIX + "*"):
        # A young one is perhaps just being started.
        young = time.time() - path.stat().st_mtime < START_SECONDS
        if not young and not supervisor_is_alive(path):
            remove(path)


def remove(state: Path) -> None:
    """Remove the folder and the control groups of a cluster that is over."""
    for groups in (FREEZER, MEMORY):
        for folder, _, _ in os.walk(groups / state.name, topdown=False):
            os.rmdir(folder)
    shutil.rmtree(state, ignore_errors=True)


class Supervisor:
    """The process that all others of a cluster die with."""

    def __init__(self, state: Path, root: Path, shape: Shape):
        self.state = state
        self.root = root
        self.shape = shape
        self.names = [f"node{i}" for i in range(1, shape.nodes + 1)]
        self.link = ""
        self.daemons: dict[str, subprocess.Popen] = {}
        self.hosts: dict[str, tuple[int, list[str]]] = {}

    def start(self) -> None:
        (self.state / "supervisor.pid").write_text(str(os.getpid()))
        self.switch = self.spawn("switch", ["unshare", "--net", "sleep", "infinity"])
        (self.state / "switch.pid").write_text(str(self.switch.pid))
        self.link, self.subnet = self.connect_machine()
        self.write_files()
        munge = {"key-file": "key", "pid-file": "pid", "log-file": "log"}
        munge |= {"seed-file": "seed", "socket": "socket"}
        files = [f"--{name}={self.state}/munge.{end}" for name, end in munge.items()]
        self.spawn("munged", ["munged", "--foreground", "--force", *files])
        self.wait_for((self.state / "munge.socket").exists, "munged has no socket")
        conf = str(self.state / "slurm.conf")
        # A controller has a machine of its own: here, it goes before the nodes' work.
        slurmctld = ["nice", "-n", "-10", "slurmctld", "-D", "-f", conf]
        self.add_host("controller", 2, slurmctld)
        for i, name in enumerate(self.names):
            self.add_host(name, 11 + i, ["slurmd", "-D", "-f", conf, "-N", name])
        self.wait_for(self.all_idle, "not every node became idle")

    def spawn(self, name: str, command: list[str], **options) -> subprocess.Popen:
        """Start a process that is killed when this one dies."""
        command = ["setpriv", "--pdeathsig", "KILL", *command]
        env = os.environ | {"SLURM_CONF": str(self.state / "slurm.conf")}
        env["PATH"] += ":/usr/sbin:/sbin"
        log = (self.state / f"{name}.out").open("a")
        options = {"stdin": subprocess.DEVNULL, "env": env} | options
        process = subprocess.Popen(command, stdout=log, stderr=log, **options)
        self.daemons[name] = process
        if "--net" in command:
            own = os.readlink("/proc/self/ns/net")
            self.wait_for(
                lambda: os.readlink(f"/proc/{process.pid}/ns/net") != own,
                f"no network for {name}",
            )
        return process

    def connect_machine(self) -> tuple[str, str]:
        """Plug the machine into the switch.

        Return the link's name and the network's first three numbers.
        """
        self.inside(self.switch, "ip link add switch type bridge")
        self.inside(self.switch, "ip link set switch up")
        for i in range(256):
            subnet = f"10.197.{i}"
            if subnet + "." in run("ip -4 address show") + run("ip -4 route show"):
                continue
            link = f"slurm{i}"
            peer = f"machine netns {self.switch.pid}"
            add = f"ip link add {link} type veth peer name {peer}"
            if subprocess.run(add.split(), capture_output=True).returncode == 0:
                break
        else:
            raise ClusterError("no free network among 10.197.0.0/16")
        run(f"ip address add {subnet}.1/24 dev {link}")
        run(f"ip link set {link} up")
        self.inside(self.switch, "ip link set machine master switch up")
        return link, subnet

    def write_files(self) -> None:
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={self.subnet}.{11 + i} CPUs={self.shape.cpus}"
            " RealMemory=1000000"
            + (f" Gres=gpu:{self.shape.gpus}" if self.shape.gpus else "")
            for i, name in enumerate(self.names)
        )
        plugins = ["task/affinity"] * self.shape.bind_tasks + [
            "task/cgroup"
        ] * self.shape.limit_memory
        (self.state / "slurm.conf").write_text(
            SLURM_CONF.format(
                state=self.state,
                subnet=self.subnet,
                first_job=self.shape.first_job,
                nodes=nodes,
                proctrack=f"proctrack/{self.shape.proctrack}",
                task=f"TaskPlugin={','.join(plugins)}" if plugins else "",
                scripts="\n".join(self.write_scripts()),
            )
        )
        if self.root != Path("/"):
            (self.state / "bin").mkdir()
            for name in COMMANDS:
                path = self.state / "bin" / name
                path.write_text(
                    COMMAND.format(state=self.state, root=self.root, name=name)
                )
                path.chmod(0o755)
        # Slurm wants a device file for every GPU: these are /dev/null by another name.
        for i in range(self.shape.gpus):
            os.mknod(self.state / f"gpu{i}", 0o666 | 0o020000, os.makedev(1, 3))
        gres = (
            f"Name=gpu File={self.state}/gpu[0-{self.shape.gpus - 1}]\n"
            if self.shape.gpus
            else ""
        )
        (self.state / "gres.conf").write_text(gres)
        (self.state / "job_container.conf").write_text(
            "".join(
                f"NodeName={name} AutoBasePath=true BasePath={self.state}/own-{name}\n"
                for name in self.names
            )
        )
        # Where the kernel has control groups of version 2, slurmd would want systemd to
        # make some.
        version = tuple(
            int(number)
            for number in re.findall(r"\d+", run(f"chroot {self.root} slurmd -V"))[:2]
        )
        if self.shape.proctrack == "cgroup":
            if not FREEZER.exists():
                raise ClusterError(
                    "--proctrack=cgroup wants control groups of version 1 here"
                )
            (FREEZER / self.state.name).mkdir()
            limit = "ConstrainRAMSpace=yes\n" if self.shape.limit_memory else ""
            if limit:
                (MEMORY / self.state.name).mkdir()
            (self.state / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n" + limit)
        elif version >= (23, 11):  # older ones do not know the word
            (self.state / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        (self.state / "host.sh").write_text(HOST)
        hosts = [
            "127.0.0.1 localhost",
            f"{self.subnet}.1 {socket.gethostname()}",
            f"{self.subnet}.2 controller",
        ]
        for i, name in enumerate(self.names):
            # The second spelling is for c10d, which wants the names of its IPv6 peers
            # and warns without.
            hosts += [
                f"{self.subnet}.{11 + i} {name}",
                f"::ffff:{self.subnet}.{11 + i} {name}",
            ]
        (self.state / "hosts").write_text("\n".join(hosts) + "\n")
        for name in self.names:
            (self.state / f"spool-{name}").mkdir()
        (self.state / "controller").mkdir()
        key = self.state / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)

    def write_scripts(self) -> list[str]:
        """Write the site's scripts; return the lines of slurm.conf that name them."""
        scripts = {
            "Prolog": self.shape.prolog,
            "Epilog": self.shape.epilog,
            "TaskProlog": self.shape.task_prolog,
        }
        if self.shape.topology:
            (self.state / "topology.conf").write_text(self.shape.topology)
        # When a job begins, and on each of its nodes.
        flags = ["Alloc"] * bool(self.shape.prolog)
        flags += ["Contain"] * self.shape.own_tmp
        lines = [f"PrologFlags={','.join(flags)}"] if flags else []
        if self.shape.topology:
            lines.append("TopologyPlugin=topology/tree")
        if self.shape.own_tmp:
            lines.append("JobContainerType=job_container/tmpfs")
        for name, script in scripts.items():
            if script:
                path = self.state / name
                path.write_text(f"#!/bin/bash\n{script}\n")
                path.chmod(0o755)
                lines.append(f"{name}={path}")
        return lines

    def add_host(
        self, name: str, number: int, command: list[str], uptime: str = ""
    ) -> None:
        """Start a host, connect it to the switch and let it run `command`."""
        self.hosts[name] = (number, command)
        unshare = f"unshare {uptime} --net --uts --mount --pid".split()
        if self.shape.own_tmp:
            # Slurm 22.05 cannot mount a job's namespace if its number is below its
            # node's. Linux 6.18 counts them for each CPU.
            cpus = sorted(os.sched_getaffinity(0))
            unshare = f"taskset -c {cpus[number % len(cpus)]}".split() + unshare
        unshare += "--fork --kill-child --mount-proc".split()
        script = ["sh", f"{self.state}/host.sh", str(self.state), name]
        script += [f"{self.subnet}.{number}", str(self.root)]
        host = self.spawn(name, [*unshare, *script, *command], stdin=subprocess.PIPE)
        (self.state / f"{name}.pid").write_text(str(host.pid))
        # A host that comes back has the same network card: the others remember its
        # hardware address.
        card = f"name eth0 address 02:00:00:00:00:{number:02x} netns {host.pid}"
        run(f"ip link add {name} netns {self.switch.pid} type veth peer {card}")
        self.inside(self.switch, f"ip link set {name} master switch up")
        host.stdin.write(b"connected\n")
        host.stdin.close()

    def revive(self) -> None:
        """Start the hosts that have crashed."""
        for name in [
            name for name in self.hosts if self.daemons[name].poll() is not None
        ]:
            del self.daemons[name]
        for name in self.hosts.keys() - self.daemons.keys():
            # The kernel removes the cable of a host that is gone, but some time later.
            delete = f"nsenter --target {self.switch.pid} --net ip link delete {name}"
            subprocess.run(delete.split(), capture_output=True)
            # Slurm sees by its uptime that a host was away.
            uptime = (
                f"--time --boottime={1 - int(time.clock_gettime(time.CLOCK_BOOTTIME))}"
            )
            self.add_host(name, *self.hosts[name], uptime)
        (self.state / "revived").touch()

    def inside(self, process: subprocess.Popen, command: str) -> None:
        run(f"nsenter --target {process.pid} --net {command}")

    def all_idle(self) -> bool:
        command, env = (
            "sinfo -hN -p main -o %T".split(),
            os.environ | Cluster(self.state).env,
        )
        states = subprocess.run(command, env=env, capture_output=True, text=True).stdout
        return states.split() == ["idle"] * len(self.names)

    def wait_for(self, condition, complaint: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            dead = [
                name
                for name, process in self.daemons.items()
                if process.poll() is not None
            ]
            if dead or time.monotonic() > deadline:
                name = dead[0] if dead else "slurmctld"
                raise ClusterError(f"{complaint}\n{self.last_words(name)}")
            time.sleep(0.05)

    def last_words(self, name: str) -> str:
        logs = [
            path
            for path in self.state.glob(f"*{name}*")
            if path.suffix in (".out", ".log")
        ]
        return "\n".join(
            f"{path.name}: {line}"
            for path in logs
            for line in path.read_text().splitlines()[-8:]
        )

    def stop(self) -> None:
        for process in self.daemons.values():
            process.kill()
        for process in self.daemons.values():
            process.wait()
        # The kernel removes the link with the switch, but some time later.
        subprocess.run(["ip", "link", "delete", self.link], capture_output=True)
        remove(self.state)


def run(command: str) -> str:
    env = os.environ | {"PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
    result = subprocess.run(
        shlex.split(command), env=env, capture_output=True, text=True
    )
    if result.returncode != 0:
        raise ClusterError(f"`{command}` failed: {result.stderr.strip()}")
    return result.stdout


def supervise(state: Path, root: Path, shape: Shape, answer: int) -> None:
    """Start a cluster and say so on file descriptor `answer`.

    Stop it on SIGTERM or at the end of stdin.
    """
    wake, wake_writer = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wake_writer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    supervisor = Supervisor(state, root, shape)
    message = "ready"
    try:
        supervisor.start()
    except (ClusterError, OSError) as error:
        message = str(error)
    os.write(answer, message.encode())
    os.close(answer)
    alive = message == "ready"
    while alive:
        ready, _, _ = select.select(
            [wake] if (state / "detached").exists() else [wake, sys.stdin], [], []
        )
        signals = set(os.read(wake, 100)) if wake in ready else {signal.SIGTERM}
        alive = signals == {signal.SIGUSR1}
        if alive:
            supervisor.revive()
    supervisor.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser(
        "up",
        help="start a cluster if none runs; print the line that points a shell at it",
    )
    up.add_argument("--nodes", type=int, default=2)
    up.add_argument("--gpus", type=int, default=4, help="GPUs a node (default: 4)")
    up.add_argument("--slurm", choices=["installed", *RELEASES], default="installed")
    up.add_argument(
        "--proctrack",
        choices=PROCTRACK,
        default="linuxproc",
        help="how it finds jobs' processes",
    )
    commands.add_parser(
        "down", help="stop the cluster; print the line that lets a shell forget it"
    )
    execute = commands.add_parser("exec", help="run a command on a node")
    execute.add_argument("node")
    execute.add_argument("argv", nargs=argparse.REMAINDER)
    internal = commands.add_parser("supervise")
    for name, kind in (("state", Path), ("root", Path), ("shape", json.loads)):
        internal.add_argument(name, type=kind)
    internal.add_argument("answer", type=int)
    args = parser.parse_args()
    if args.command == "supervise":
        return supervise(args.state, args.root, Shape(**args.shape), args.answer)
    try:
        clusters = running()
        if args.command == "up":
            if clusters:  # as it is, for another shell
                cluster, said = clusters[0], "were running already, as they are"
            else:
                names = ("nodes", "gpus", "slurm", "proctrack")
                shape = {name: getattr(args, name) for name in names}
                # A job asks for more CPUs than this machine has. But tests are not to
                # get this: the variable wins over the one that job.sh exports.
                shape["task_prolog"] = "echo export OMP_NUM_THREADS=1"
                cluster, said = start(**shape, cpus=64)[0], "are ready"
            env = cluster.env.items()
            print("export", *(f"{name}={shlex.quote(value)}" for name, value in env))
            print(f"{len(cluster.nodes)} nodes {said}", file=sys.stderr)
        elif args.command == "down":
            forget = "unset SLURM_CONF"
            for cluster in clusters:
                if "PATH" in cluster.env:
                    forget += f"; PATH=${{PATH#{cluster.state}/bin:}}"
                cluster.stop()
            print(forget)
            stopped = f"{len(clusters)} stopped" if clusters else "none is running"
            print(f"{stopped}; in the shells that use it: {forget}", file=sys.stderr)
        elif not clusters:
            raise ClusterError("no cluster is running: start one with `up`")
        else:
            command = [*clusters[0].namespaces(args.node), *args.argv]
            os.execvpe(command[0], command, os.environ | clusters[0].env)
    except ClusterError as error:
        sys.exit(f"cluster.py: error: {error}")


if __name__ == "__main__":
    main()
