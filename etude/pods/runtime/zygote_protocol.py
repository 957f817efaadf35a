"""The zygote's requests: the frames of `guest/protocol.py` with these ops and fields, over a UNIX socket.

CREATE is the full specification of a pod, so that the zygote makes no decisions and looks nothing up.

    request   fields                                                                reply
    CREATE    ID, WORKDIR FLAGS FILTER, GROUP (a v2 control group),                 OK PID
              CGROUP* (files a pid is written to); with the guest init's listening socket; and
              with namespaces: LOWER* (top first), UPPER | SIZE INODES, UIDMAP GIDMAP OWNER, BIND* (source NUL target),
              HOSTNAME SHM CAPS, ADDRESS* LISTEN* (kind address port)
              without: OWNER (its own user), RULESET RULE* (rights, path) NOTIFY (the second filter),
              PORT of the egress proxy, whose listening socket comes with it
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

ID, LOWER, UPPER, SIZE, INODES, BIND, UIDMAP, GIDMAP, OWNER, CGROUP, HOSTNAME, WORKDIR, CAPS = range(128, 141)
FILTER, ADDRESS, LISTEN, FLAGS, SHM, LAYER, PATH, PID, GROUP, RULESET, RULE, NOTIFY, PORT = range(141, 154)

# FLAGS. The OOM killer prefers the pod's programs to its guest init; useful with a memory limit.
ADJUST_OOM_SCORE = 1
ZYGOTE_OPENS_TERMINALS = 2  # the guest init may not

# Directories of the state directory
MEMORY, MAPPED, STAGE, ROOT = "memory", "mapped", "stage", "root"
