/* What keeper.c (requests), mounts.c (the kernel's calls) and enter.c (the life of a new pod) share. */
#ifndef ETUDE_KEEPER_H
#define ETUDE_KEEPER_H

#include <sys/resource.h>
#include <sys/types.h>

#include "wire.h"

/* Constants of the new mount API; not from headers, because those of musl and of older systems do not have them. */
enum {
    AT_HERE = -100, AT_EMPTY = 0x1000, AT_ALL_BELOW = 0x8000,
    ATTR_RDONLY = 1, ATTR_NOSUID = 2, ATTR_NODEV = 4, ATTR_IDMAP = 0x100000,
};

/* A file system option; without a value it is a flag. */
struct option {
    const char *name, *value;
};

/* A file system not yet attached anywhere, as a descriptor. */
int new_mount(const char *kind, const struct option *options, size_t count, int attributes);
/* Put a detached mount at `target`. */
int attach(int tree, const char *target);
/* A detached copy of the mount at a path, or of an open directory when that is "". */
int clone_tree(int directory, const char *path, bool recursive);
int set_attributes(int tree, uint64_t attributes, bool recursive, int user_namespace);
int write_to(const char *path, const void *text, size_t size);
/* Write a file of a process in /proc. */
int write_map(pid_t pid, const char *file, const void *text, size_t size);
/* The tmpfs of a plan, mounted at the stage, as a detached copy. */
int stage_memory(const struct request *r);
/* A descriptor of a user namespace with these maps. */
int user_namespace(struct span uids, struct span gids);

#define STAGE "stage"
#define MEMORY "memory"
#define MAPPED "mapped"
#define ROOT "root"

/* What a new pod's first process gets of the keeper. */
struct birth {
    int listener, go, life; /* the agent's socket; a byte comes when the ids are mapped; ends when the keeper does */
    struct rlimit files;    /* as it was before the keeper raised it for itself */
};

/* Build the pod's world, lock in, serve; in the child of a clone. */
__attribute__((noreturn)) void be_pod(const struct request *plan, const struct birth *birth);

#endif
