"""What the keeper is asked: the frames of `wire.py` with these ops and fields, over a UNIX socket.

A CREATE is a full plan of a pod, decided here in Python, so that the keeper (and its compiled twin) only carries
out: it looks nothing up and chooses nothing. Imported by the keeper: standard library only.

    request   fields                                                                answer
    CREATE    ID, LOWER* (top first), UPPER | SIZE INODES, UIDMAP GIDMAP OWNER,     OK PID
              BIND* (source NUL target), HOSTNAME WORKDIR SHM FLAGS, CAPS FILTER,
              GROUP (a v2 control group), CGROUP* (files a pid is written to),
              ADDRESS* LISTEN* (kind address port); with it the agent's listening socket
    KILL      ID                                                                    OK when every process is gone
    SEAL      ID LAYER   what the pod wrote becomes the layer; the pod ends         OK
    FETCH     ID | LAYER the directory of what was written                          OK and a descriptor
    DROP      LAYER                                                                 OK
    MAP       LAYER PATH UIDMAP GIDMAP   an id-mapped view of a layer on disk       OK
    STATUS                                                                          OK ID* LAYER*
    STOP      ends the keeper and with it every pod                                 OK

A layer in memory is a directory `memory/LAYER/u` of the state directory, and an id-mapped one `mapped/LAYER`: both
can be seen in the keeper's mount namespace only.
"""

CREATE, KILL, SEAL, FETCH, DROP, MAP, STATUS, STOP = range(32, 40)

(
    ID,
    LOWER,
    UPPER,
    SIZE,
    INODES,
    BIND,
    UIDMAP,
    GIDMAP,
    OWNER,
    CGROUP,
    HOSTNAME,
    WORKDIR,
    CAPS,
    FILTER,
    ADDRESS,
    LISTEN,
    FLAGS,
    SHM,
    LAYER,
    PATH,
    PID,
    GROUP,
) = range(128, 150)

MARK_CHILDREN = 1  # FLAGS: programs are the first to go when memory runs out; needs a memory limit to make sense

SOCKET, LOCK, LOG = "keeper.sock", "keeper.lock", "keeper.log"
MEMORY, MAPPED, STAGE, ROOT = "memory", "mapped", "stage", "root"  # directories of the state directory
