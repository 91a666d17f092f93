"""A name server that is busy for a moment."""

import pytest
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
