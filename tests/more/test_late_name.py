"""Names of nodes: a name server that is busy for a moment, and a second name."""

import re

import pytest
from slurm_jobs import every_case
from test_launch import ONE_EACH, ONE_EPOCH, SMALL, trained

# Rank 1's node learns where node1 is when main.py waits to ask again.
LATE = """
[ $SLURM_PROCID = 0 ] || {
    grep -v node1 /etc/hosts > /tmp/hosts
    mount --bind /tmp/hosts /etc/hosts
    rm /tmp/hosts
    until grep -qs nanosleep $(pgrep -f "bin/python[^ ]* main.py" \
        | sed "s:.*:/proc/&/wchan:"); do
        sleep 0.1
    done && umount /etc/hosts && echo "now there is node1" &
}
exec "$@"
"""


@pytest.mark.usefixtures("nothing_left")
def test_late_name(jobs, archive):
    """A rank asks once more for the address of MASTER_ADDR before it gives up."""
    main = ["uv", "run", "--no-sync", "python", "main.py", *ONE_EPOCH]
    main += ["--data-dir", archive.parent]
    srun = ["srun", "--kill-on-bad-exit", "unshare", "--mount", "bash", "-c", LATE]
    salloc = ["salloc", *SMALL, "--nodelist=node[1-2]", *ONE_EACH]
    result = jobs.run(
        [*salloc, *srun, "bash", *main], "multi_node", MASTER_ADDR="node1"
    )
    assert result.find("^now there is node1$"), result
    trained(result, "multi_node", 2)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("script", every_case("job_torchrun.sh", "job.sh"))
def test_name_in_the_fast_network(jobs, tmp_path, script):
    """The first node has another name and address there, as on JSC's machines."""
    text = (jobs.clone / "multi_node" / script).read_text()
    edited = tmp_path / script
    edited.write_text(text.replace("\nmaster_suffix=\n", "\nmaster_suffix=i\n"))
    slow = jobs.cluster.address("node1")
    fast = re.sub(r"\d+$", "250", slow)
    device = f"$(ip -o -4 address | awk '$4 ~ /^{slow}/ {{print $2}}')"
    jobs.on("node1", "bash", "-c", f"ip address add {fast}/24 dev {device}")
    for node in ("node1", "node2"):
        jobs.on(node, "bash", "-c", f"echo {fast} node1i >> /etc/hosts")
    try:
        job = [*SMALL, "--nodelist=node[1-2]", *ONE_EACH, edited, *ONE_EPOCH]
        result = jobs.sbatch("multi_node", *job)
    finally:
        jobs.on("node1", "bash", "-c", f"ip address del {fast}/24 dev {device}")
        for node in ("node1", "node2"):
            jobs.on(node, "bash", "-c", "sed '/node1i/d' /etc/hosts > /tmp/hosts")
            jobs.on(node, "bash", "-c", "cat /tmp/hosts > /etc/hosts; rm /tmp/hosts")
    result.trained(2, batch_size=4)
