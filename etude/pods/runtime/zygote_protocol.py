"""The zygote's requests: the frames of `guest/protocol.py` with these ops and fields, over a UNIX socket.

CREATE is the full specification of a pod, so that the zygote, in Python or compiled, makes no decisions and looks
nothing up. Imported by the zygote: standard library only.

    request   fields                                                                reply
    CREATE    ID, LOWER* (top first), UPPER | SIZE INODES, UIDMAP GIDMAP OWNER,     OK PID
              BIND* (source NUL target), HOSTNAME WORKDIR SHM FLAGS, CAPS FILTER,
              GROUP (a v2 control group), CGROUP* (files a pid is written to),
              ADDRESS* LISTEN* (kind address port); with the guest init's listening socket
    KILL      ID                                                                    OK when every process is gone
    SEAL      ID LAYER   ends the pod and turns its writes into the layer           OK
    FETCH     ID | LAYER the directory that holds the writes                        OK and a descriptor
    DROP      LAYER                                                                 OK
    MAP       LAYER PATH UIDMAP GIDMAP   an id-mapped view of a layer on disk       OK
    STATUS                                                                          OK ID* LAYER*
    STOP      ends the zygote and with it every pod                                 OK

A layer in memory is a directory `memory/LAYER/u` of the state directory, and an id-mapped one `mapped/LAYER`: both
are visible in the zygote's mount namespace only.
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

ADJUST_OOM_SCORE = 1  # FLAGS: the OOM killer prefers the pod's programs to its guest init; useful with a memory limit

# Files and directories of the state directory. These names do not change, so that versions that share a state
# directory share one zygote.
SOCKET, LOCK, LOG = "keeper.sock", "keeper.lock", "keeper.log"
MEMORY, MAPPED, STAGE, ROOT = "memory", "mapped", "stage", "root"
