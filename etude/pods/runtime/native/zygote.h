/* Shared by main.c, zygote.c (requests), pods.c (processes), enter.c, confine.c and mounts.c (setup of a new pod). */
#ifndef ETUDE_ZYGOTE_H
#define ETUDE_ZYGOTE_H

#include <sys/resource.h>
#include <sys/types.h>

#include "protocol.h"

/* Constants of the new mount API, which the headers of musl and of older systems lack. */
enum {
    AT_HERE = -100, AT_EMPTY = 0x1000, AT_ALL_BELOW = 0x8000,
    ATTR_RDONLY = 1, ATTR_NOSUID = 2, ATTR_NODEV = 4, ATTR_IDMAP = 0x100000,
};

/* The ids of a pod: `count` from `inside` on, 0 but for some layers, are those from `first` on outside. */
struct ids {
    uint32_t inside, first, count;
    int slot;          /* which of the ranges; 0 where pods share one */
    bool own;          /* no other pod has them, and what it writes is stored with the ids that it sees */
    int namespace;     /* a user namespace with this map, to mount layers by; or -1 */
};

/* A file system option; without a value it is a flag. */
struct option {
    const char *name, *value;
};

/* Return the descriptor of a new detached mount. */
int new_mount(const char *kind, const struct option *options, size_t count, int attributes);
/* Attach a detached mount at `target`. */
int attach(int tree, const char *target);
/* Return a detached copy of the mount at a path, or of an open directory if the path is "". */
int clone_tree(int directory, const char *path, bool recursive);
int set_attributes(int tree, uint64_t attributes, bool recursive, int user_namespace);
int write_to(const char *path, const void *text, size_t size);
/* Write a file of a process in /proc. */
int write_map(pid_t pid, const char *file, const void *text, size_t size);
/* Mount what a pod writes to, and its layers with its ids, at the stage. `image` is the descriptor of an ext4 image to
 * write to, or -1; `*tree` is a detached copy of the mount of that image or of a tmpfs. */
int stage_files(const struct request *r, const struct ids *ids, int image, int *tree);
/* Return the path of a new loop device of an open file, to mount; `*device` keeps it until closed. */
int attach_loop(int file, char path[32], int *device);
/* Close the last descriptor of a mount in a child process: what is left to write to a disk may take seconds. */
void close_in_child(int tree);
/* Write the id map of a new user namespace. */
int map_ids(pid_t pid, const struct ids *ids);
/* Return a descriptor of a user namespace with this map. */
int user_namespace(const struct ids *ids);

#define STAGE "stage"
#define STAGED_WRITES STAGE "/m"
#define MEMORY "memory-3"
#define ROOT "root"

/* Descriptors and limits that a new pod's first process inherits from the zygote. */
struct pod_setup {
    int listener; /* the guest init's socket */
    int go;       /* a byte arrives when the ids are mapped */
    int liveness; /* a pipe that closes when the zygote dies */
    struct rlimit files; /* of the pod's programs; the guest init keeps the zygote's */
    bool own_ids;
    /* of a pod without namespaces; -1 where there is none */
    int proxy;           /* the listening socket of its egress proxy */
    int channel;         /* to the zygote */
    int broker;          /* to its broker */
    const char *workdir;
};

/* Set up the pod, drop privileges and serve as guest init; runs in the child of a clone. */
__attribute__((noreturn)) void run_pod(const struct request *spec, struct pod_setup *setup);
/* Set up a pod without namespaces. */
int enter_directory(const struct request *spec, const struct pod_setup *setup);
/* Serve the connects of a pod without namespaces until its last process ends. */
__attribute__((noreturn)) void run_broker(const struct request *spec, int channel, pid_t parent);

enum {
    MAX_CONNECTIONS = 256,
    MAX_DESCRIPTORS = 8, /* of one message */
    MAX_SLOTS = 2048,    /* ranges of ids; more pods share them */
    NAME = 200,          /* bytes of the name of a pod or layer */
};

/* A created pod: its first process, the tmpfs or disk image it writes to, and the process that watches its directory
 * instead; without namespaces its broker and our channel to it. */
struct pod {
    struct pod *next;
    char name[NAME];
    pid_t pid, broker, watcher;
    int tree, channel; /* or -1 */
    int slot;          /* its range of ids */
    bool alive, on_disk; /* on_disk: `tree` is a disk image */
    char *group; /* its v2 control group, or NULL */
};

/* A mounted layer. */
struct layer {
    struct layer *next;
    char name[NAME];
    bool on_disk;
};

struct connection {
    int fd;
    struct buffer received;
    int descriptors[MAX_DESCRIPTORS], descriptor_count;
};

struct zygote {
    int listener, signals, liveness_w;
    struct pod_setup setup;
    struct pod *pods;
    struct layer *memory;
    int namespaces_of[MAX_SLOTS]; /* a user namespace with the ids of a slot, or 0 */
    bool keeps_capabilities;      /* when it changes its user */
    struct connection connections[MAX_CONNECTIONS];
    int connected;
    bool namespaces, running;
};
extern struct zygote zygote;

/* Serve requests until a STOP, a SIGTERM, or half a minute without pods, layers and connections; end every pod. */
void serve_zygote(void);
struct pod *find_pod(const char *name);
/* Forget a pod that has ended. */
void drop_pod(struct pod *pod);
int end_pod(struct pod *pod);
void reap_pods(void);
pid_t clone_pod(const struct request *r, struct pod_setup *setup, const struct ids *ids);
int fork_pod(struct pod *pod, const struct request *r, struct pod_setup *setup);
/* Measure what a pod has written to its directory and kill the pod when that exceeds its limits; ends with the pod. */
__attribute__((noreturn)) void run_watcher(const struct request *spec, const struct pod *pod, int pidfd, pid_t parent);
/* Start the process that watches what a new pod writes, if requested. */
int watch_pod(struct pod *pod, const struct request *r);

int lower_limit(int kind, rlim_t most);
/* Lower the limits that the kernel counts by user, unless no other pod has the user; `pids` 0: no limit. */
int limit_user(bool own_user, int64_t pids);
/* Exit if the zygote died before the kernel knew that we end with it. */
void exit_if_orphaned(const struct pod_setup *setup);
/* Drop all capabilities but `keep` irreversibly, in the bounding set too if requested. */
int drop_capabilities(uint64_t keep, bool bounding);
/* Install a filter, an array of instructions of 8 bytes; return its descriptor with NEW_LISTENER, else 0, or -1. */
int install_filter(struct span program, unsigned flags);
enum { SYNC_THREADS = 1, NEW_LISTENER = 8 };

#endif
