/* Mounts, and system calls that the C library does not wrap; each names its operation in `last_error` on failure. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "zygote.h"

enum { SYS_OPEN_TREE = 428, SYS_MOVE_MOUNT, SYS_FSOPEN, SYS_FSCONFIG, SYS_FSMOUNT, SYS_SETATTR = 442 };
enum { SET_FLAG = 0, SET_STRING = 1, CMD_CREATE = 6, F_EMPTY = 4, T_SYMLINKS = 0x10, TREE_CLONE = 1 };

int new_mount(const char *kind, const struct option *options, size_t count, int attributes)
{
    int context = (int)syscall(SYS_FSOPEN, kind, 1);
    if (context < 0)
        return fail_errno("open file system %s", kind);
    int tree = -1;
    for (size_t i = 0; i < count; i++) {
        const struct option *o = &options[i];
        if (syscall(SYS_FSCONFIG, context, o->value ? SET_STRING : SET_FLAG, o->name, o->value, 0)) {
            fail_errno("%s: %s%s%s", kind, o->name, o->value ? "=" : "", o->value ? o->value : "");
            goto out;
        }
    }
    if (syscall(SYS_FSCONFIG, context, CMD_CREATE, NULL, NULL, 0))
        fail_errno("create %s", kind);
    else if ((tree = (int)syscall(SYS_FSMOUNT, context, 1, attributes)) < 0)
        fail_errno("mount %s", kind);
out:
    close(context);
    return tree;
}

int attach(int tree, const char *target)
{
    int flags = F_EMPTY | (!strncmp(target, "/proc/self/fd/", 14) ? T_SYMLINKS : 0);
    if (syscall(SYS_MOVE_MOUNT, tree, "", AT_HERE, target, flags))
        return fail_errno("attach a mount at %s", target);
    return 0;
}

int clone_tree(int directory, const char *path, bool recursive)
{
    int flags = TREE_CLONE | O_CLOEXEC | (recursive ? AT_ALL_BELOW : 0) | (*path ? 0 : AT_EMPTY);
    int tree = (int)syscall(SYS_OPEN_TREE, directory, path, flags);
    return tree < 0 ? fail_errno("clone the mount of %s", *path ? path : "a directory") : tree;
}

int set_attributes(int tree, uint64_t attributes, bool recursive, int user_namespace)
{
    uint64_t packed[4] = {attributes, 0, 0, (uint64_t)user_namespace};
    if (syscall(SYS_SETATTR, tree, "", AT_EMPTY | (recursive ? AT_ALL_BELOW : 0), packed, sizeof packed))
        return fail_errno("set the attributes of a mount");
    return 0;
}

int write_to(const char *path, const void *text, size_t size)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return fail_errno("%s", path);
    ssize_t written = write(fd, text, size);
    int failed = written == (ssize_t)size ? 0 : fail_errno("write %.*s to %s", (int)size, (const char *)text, path);
    close(fd);
    return failed;
}

int write_map(pid_t pid, const char *file, const void *text, size_t size)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, file);
    return write_to(path, text, size);
}

int map_ids(pid_t pid, const struct ids *ids)
{
    char text[40];
    size_t size = (size_t)snprintf(text, sizeof text, "%u %u %u\n", ids->inside, ids->first, ids->count);
    if (write_map(pid, "uid_map", text, size) || (ids->count == 1 && write_map(pid, "setgroups", "deny", 4)))
        return -1;
    return write_map(pid, "gid_map", text, size);
}

/* Return a descriptor of a user namespace with this map; its process has ended. */
int user_namespace(const struct ids *ids)
{
    char path[64];
    int hold[2], fd = -1;
    if (pipe2(hold, O_CLOEXEC))
        return fail_errno("make a pipe");
    pid_t pid = (pid_t)syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
    if (pid == 0) {
        close(hold[1]);
        _exit(read(hold[0], path, 1) < 0);
    }
    if (pid < 0)
        fail_errno("clone into a user namespace");
    else if (!map_ids(pid, ids)) {
        snprintf(path, sizeof path, "/proc/%d/ns/user", (int)pid);
        if ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
            fail_errno("%s", path);
    }
    close(hold[0]);
    close(hold[1]);
    if (pid > 0)
        waitpid(pid, NULL, 0);
    return fd;
}

/* Mount a copy of the mount at `path` on the new directory `target`, with other ids. */
static int attach_mapped(const char *path, const char *target, int namespace, bool writable)
{
    if (mkdir(target, 0700))
        return fail_errno("%s", target);
    int tree = clone_tree(AT_HERE, path, false);
    if (tree < 0)
        return -1;
    int failed = set_attributes(tree, ATTR_IDMAP | (writable ? 0 : ATTR_RDONLY), false, namespace) || attach(tree, target);
    close(tree);
    return failed ? -1 : 0;
}

/* Mount a layer, `SHIFT PATH`: its files have the ids that the pod sees, plus SHIFT in layers of earlier versions. */
static int attach_layer(struct span layer, const char *target, const struct ids *ids)
{
    char text[PATH_MAX], *path;
    if (!text_of(layer, text, sizeof text))
        return fail(EINVAL, "the path of a layer is too long");
    struct ids shifted = {(uint32_t)strtoul(text, &path, 10), ids->first, ids->count, 0, false, -1};
    if (path == text || *path++ != ' ' || !*path)
        return fail(EINVAL, "a layer is not `SHIFT PATH`");
    if (shifted.inside && (shifted.namespace = user_namespace(&shifted)) < 0)
        return -1;
    int failed = attach_mapped(path, target, shifted.inside ? shifted.namespace : ids->namespace, false);
    if (shifted.inside)
        close(shifted.namespace);
    return failed;
}

static int attach_layers(const struct request *r, const struct ids *ids)
{
    char target[32];
    struct span value;
    int key, count = 0;
    for (size_t at = 0; next_field(r, &at, &key, &value);) {
        if (key != ZYGOTE_MAPPED)
            continue;
        snprintf(target, sizeof target, STAGE "/l%d", count++);
        if (attach_layer(value, target, ids))
            return -1;
    }
    return 0;
}

static int stage_tmpfs(const struct request *r)
{
    char size[32], inodes[32];
    struct option options[3] = {{"mode", "0755"}};
    size_t count = 1;
    bool writes = !field(r, ZYGOTE_UPPER).data; /* otherwise only mount points are made here */
    if (writes && field(r, ZYGOTE_SIZE).data) {
        snprintf(size, sizeof size, "%lld", (long long)number(r, ZYGOTE_SIZE, 0));
        options[count++] = (struct option){"size", size};
    }
    if (writes && field(r, ZYGOTE_INODES).data) {
        snprintf(inodes, sizeof inodes, "%lld", (long long)number(r, ZYGOTE_INODES, 0));
        options[count++] = (struct option){"nr_inodes", inodes};
    }
    int fresh = new_mount("tmpfs", options, count, ATTR_NODEV);
    int failed = fresh < 0 || attach(fresh, STAGE);
    if (fresh >= 0)
        close(fresh);
    return failed ? -1 : 0;
}

/* Mount an ext4 image, in which everything that the pod writes must fit. The device is gone with the last mount. */
static int stage_image(int image)
{
    char path[32];
    int device;
    if (attach_loop(image, path, &device))
        return -1;
    /* noinit_itable: the kernel would write zeros to the tables of inodes in the background; a new file is zero. */
    const struct option options[] = {{"source", path}, {"noinit_itable", NULL}};
    int fresh = new_mount("ext4", options, 2, ATTR_NODEV);
    int failed = fresh < 0 || attach(fresh, STAGE);
    if (fresh >= 0)
        close(fresh);
    close(device);
    return failed ? -1 : 0;
}

/* Everything is attached below the stage, and only while the pod is created.
 *
 * The kernel copies every mount of this namespace into each new pod's, so a thousand pods must not mean a thousand
 * mounts here. One unmount of the stage detaches all: each costs an RCU grace period. */
int stage_files(const struct request *r, const struct ids *ids, int image, int *tree)
{
    static const char *const directories[] = {STAGE, STAGE "/u", STAGE "/w"};
    char upper[PATH_MAX];
    struct span disk = field(r, ZYGOTE_UPPER);
    uid_t owner = ids->own ? 0 : ids->first;
    if (image >= 0 ? stage_image(image) : stage_tmpfs(r))
        return -1;
    int failed = disk.data && !text_of(disk, upper, sizeof upper) ? fail(EINVAL, "the upper directory is no path") : 0;
    for (int i = 0; i < 3 && !disk.data && !failed; i++)
        if ((i && mkdir(directories[i], 0755)) || chmod(directories[i], 0755) || chown(directories[i], owner, owner))
            failed = fail_errno("prepare %s", directories[i]);
    if (!failed && !disk.data)
        failed = (*tree = clone_tree(AT_HERE, STAGE, false)) < 0;
    if (!failed && ids->own)
        failed = attach_mapped(disk.data ? upper : STAGE, STAGED_WRITES, ids->namespace, true);
    if (failed || attach_layers(r, ids)) {
        umount2(STAGE, MNT_DETACH);
        return -1;
    }
    return 0;
}
