"""The zygote's requests: the frames of `guest/protocol.py` with these ops and fields, over a UNIX socket.

CREATE is the full specification of a pod, so that the zygote makes no decisions and looks nothing up.

    request   fields                                                                reply
    CREATE    ID, WORKDIR FLAGS FILTER, GROUP (a v2 control group),                 OK PID
              CGROUP* (files a pid is written to); with the guest init's listening socket; and
              with namespaces: LOWER* MAPPED* (layers, top first; MAPPED: shift and path, its ids are those inside),
              UPPER | SIZE INODES (of a tmpfs) | DISK_IMAGE and the image, OWNER IDS (its ids outside: the first, and
              how many), BIND* (source NUL target),
              PIDS HOSTNAME SHM CAPS, ADDRESS* LISTEN* (kind address port)
              without: OWNER (its own user), RULESET RULE* (rights, path) NOTIFY (the second filter),
              PORT of the egress proxy, whose listening socket comes with it
              WATCH (a directory on disk) SIZE INODES: a process measures it, and ends the pod over these limits
    KILL      ID                                                                    OK when every process is gone
    SEAL      ID LAYER   ends the pod and turns its writes into the layer           OK
    FETCH     ID | LAYER the directory that holds the writes                        OK and a descriptor
    DROP      LAYER                                                                 OK
    STATUS                                                                          OK ID* LAYER*
    STOP      ends the zygote and with it every pod                                 OK

A layer in memory, or on a disk image, is a directory `memory-3/LAYER/u` of the state directory, visible in the
zygote's mount namespace only.
"""

VERSION = 3  # of CREATE: programs of several versions use a zygote each, on one state directory
CREATE, KILL, SEAL, FETCH, DROP = range(32, 37)
STATUS, STOP = 38, 39

ID, LOWER, UPPER, SIZE, INODES, BIND, MAPPED, IDS, OWNER, CGROUP, HOSTNAME, WORKDIR, CAPS = range(128, 141)
FILTER, ADDRESS, LISTEN, FLAGS, SHM, LAYER, PIDS, PID, GROUP, RULESET, RULE, NOTIFY, PORT, WATCH = range(141, 155)

# FLAGS. The OOM killer prefers the pod's programs to its guest init; useful with a memory limit.
ADJUST_OOM_SCORE = 1
ZYGOTE_OPENS_TERMINALS = 2  # the guest init may not
DISK_IMAGE = 8  # a descriptor of an ext4 image comes with the request; the pod writes to it
OWN_IDS = 4  # IDS ids from OWNER + n * IDS on, for an n that no other pod has; files are stored with the ids inside

# Directories of the state directory
MEMORY, STAGE, ROOT = f"memory-{VERSION}", "stage", "root"
