/* The setup of a new pod: wait for the id maps, mount the root, drop privileges, become guest init.
 *
 * Runs in the child of the zygote's clone. The zygote does not wait for it: a failure is reported to the first client
 * that connects to the guest init's socket. Every descriptor and mount of the zygote is closed before a program runs.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <limits.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "init.h"
#include "processes.h"
#include "zygote.h"

enum {
    MAX_LAYERS = 500, /* the kernel's own limit */
    MAX_BINDS = 256,
    REPORT_MS = 5000,
    SIGNALS = 1024,    /* queued by a pod whose user has other processes */
    WATCHES_SHARE = 8, /* a pod may have this part of its user's watches */
};

/* ------------------------------------------------------------------------------------------------- mounts */

static int mount_at(const char *kind, const char *target, unsigned long flags, const char *options)
{
    return mount(kind, target, kind, flags, options) ? fail_errno("mount %s on %s", kind, target) : 0;
}

/* ------------------------------------------------------------------------------------------- mount sources */

/* The directories of the host that a pod's root file system is built from.
 *
 * Opened by the child, because a mount must belong to its own namespace to be used there, and before it becomes the
 * pod's root, which has no access to our directories. Paths are relative to the state directory, our cwd. */
static struct {
    int root, writes;
    int lower[MAX_LAYERS], layers;
    int binds[MAX_BINDS], bound;
    struct span targets[MAX_BINDS];
} sources;

static int open_source(struct span value)
{
    char path[PATH_MAX];
    if (!value.size || !text_of(value, path, sizeof path))
        return fail(EINVAL, "a path in the request is empty or too long");
    int fd = open(path, O_PATH | O_CLOEXEC);
    return fd < 0 ? fail_errno("%s", path) : fd;
}

static struct span span_of(const char *text)
{
    return (struct span){(const uint8_t *)text, (uint32_t)strlen(text)};
}

static int open_bind(struct span pair)
{
    const uint8_t *end = pair.size ? memchr(pair.data, 0, pair.size) : NULL;
    if (!end || sources.bound == MAX_BINDS)
        return fail(EINVAL, "too many binds, or one without a target");
    int fd = open_source((struct span){pair.data, (uint32_t)(end - pair.data)});
    if (fd < 0)
        return -1;
    sources.targets[sources.bound] = (struct span){end + 1, pair.size - (uint32_t)(end + 1 - pair.data)};
    sources.binds[sources.bound++] = fd;
    return 0;
}

static int open_sources(const struct request *spec, bool own_ids)
{
    struct span value, upper = field(spec, ZYGOTE_UPPER);
    char staged[32];
    int key, mapped = 0;
    if ((sources.root = open_source(span_of(ROOT))) < 0)
        return -1;
    if (own_ids || !upper.data)
        upper = span_of(own_ids ? STAGED_WRITES : STAGE);
    if ((sources.writes = open_source(upper)) < 0)
        return -1;
    for (size_t at = 0; next_field(spec, &at, &key, &value);) {
        if (key == ZYGOTE_MAPPED) {
            snprintf(staged, sizeof staged, STAGE "/l%d", mapped++);
            value = span_of(staged);
        }
        if (key == ZYGOTE_LOWER || key == ZYGOTE_MAPPED) {
            if (sources.layers == MAX_LAYERS)
                return fail(EINVAL, "more than %d layers", MAX_LAYERS);
            if ((sources.lower[sources.layers] = open_source(value)) < 0)
                return -1;
            sources.layers++;
        }
        if (key == ZYGOTE_BIND && open_bind(value))
            return -1;
    }
    return sources.layers ? 0 : fail(EINVAL, "a pod needs at least one layer");
}

/* ------------------------------------------------------------------------------------------ the root directory */

enum { FD_PATH = 40 };

static const char *at_fd(int fd, const char *below, char text[FD_PATH])
{
    snprintf(text, FD_PATH, "/proc/self/fd/%d%s", fd, below);
    return text;
}

/* Kernels before 6.8 take all layers in one option of at most a page. */
static int mount_overlay_classic(const char *upper, const char *work, const char *root)
{
    char options[4096];
    size_t at = (size_t)snprintf(options, sizeof options, "upperdir=%s,workdir=%s,volatile,userxattr,lowerdir=",
                                 upper, work);
    for (int i = 0; i < sources.layers && at < sizeof options; i++)
        at += (size_t)snprintf(options + at, sizeof options - at, "%s/proc/self/fd/%d", i ? ":" : "", sources.lower[i]);
    if (at >= sizeof options)
        return fail(E2BIG, "this kernel takes fewer layers than %d", sources.layers);
    if (mount("overlay", root, "overlay", MS_NODEV, options))
        return fail_errno("mount overlay on %s", root);
    return clone_tree(AT_HERE, root, false);
}

/* Mount the pod's root, its writes over its layers, and change into it. */
static int mount_overlay(void)
{
    static struct option options[MAX_LAYERS + 4];
    static char lower[MAX_LAYERS][FD_PATH];
    char upper[FD_PATH], work[FD_PATH], root[FD_PATH];
    size_t count = 0;
    at_fd(sources.root, "", root);
    for (int i = 0; i < sources.layers; i++)
        options[count++] = (struct option){"lowerdir+", at_fd(sources.lower[i], "", lower[i])};
    options[count++] = (struct option){"upperdir", at_fd(sources.writes, "/u", upper)};
    options[count++] = (struct option){"workdir", at_fd(sources.writes, "/w", work)};
    /* volatile: unmounting would otherwise sync the whole file system beneath (50 ms at the 99th percentile). */
    options[count++] = (struct option){"volatile", NULL};
    options[count++] = (struct option){"userxattr", NULL};
    int tree = new_mount("overlay", options, count, 0);
    if (tree >= 0 && attach(tree, root))
        return -1;
    if (tree < 0 && last_error.number == EINVAL && strstr(last_error.text, "lowerdir+"))
        tree = mount_overlay_classic(upper, work, root);
    if (tree < 0)
        return -1;
    if (fchdir(tree))
        return fail_errno("enter the new root");
    close(tree);
    return 0;
}

/* Return a read-only overlay of a directory of the host.
 *
 * Its files are inodes of the pod's own, over the same page cache: a socket or FIFO of the host below it leads nowhere,
 * and inotify does not tell what other pods and the host do there. Nothing else is mounted below it. */
static int overlay_of(int directory)
{
    char lower[FD_PATH], empty[FD_PATH];
    /* Without an upper directory the kernel wants two layers: the second is an empty directory. */
    struct option options[] = {{"lowerdir+", at_fd(directory, "", lower)},
                               {"lowerdir+", at_fd(sources.root, "", empty)}, {"userxattr", NULL}};
    int tree = new_mount("overlay", options, 3, 0);
    if (tree >= 0 || last_error.number != EINVAL || !strstr(last_error.text, "lowerdir+"))
        return tree;
    char both[2 * FD_PATH]; /* kernels before 6.8 */
    snprintf(both, sizeof both, "%s:%s", lower, empty);
    struct option classic[] = {{"lowerdir", both}, {"userxattr", NULL}};
    return new_mount("overlay", classic, 2, 0);
}

/* Return a read-only mount of a file or directory of the host.
 *
 * A directory whose file system cannot be a layer, such as an overlay over overlays, is mounted as it is, with all
 * below it. */
static int shared_mount(int source, bool directory)
{
    int tree = directory ? overlay_of(source) : -1;
    bool layer = tree >= 0;
    if (!layer && directory && last_error.number != EINVAL)
        return -1;
    if (!layer && (tree = clone_tree(source, "", directory)) < 0)
        return -1;
    return set_attributes(tree, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, !layer && directory, 0) ? -1 : tree;
}

static int mount_binds(void)
{
    char target[PATH_MAX];
    struct stat info;
    for (int i = 0; i < sources.bound; i++) {
        struct span value = sources.targets[i];
        while (value.size && *value.data == '/')
            value.data++, value.size--;
        if (!value.size || !text_of(value, target, sizeof target))
            return fail(EINVAL, "a bind has no target, or one too long");
        if (fstat(sources.binds[i], &info))
            return fail_errno("%s", target);
        int tree = shared_mount(sources.binds[i], S_ISDIR(info.st_mode));
        if (tree < 0 || attach(tree, target))
            return -1;
        close(tree);
    }
    return 0;
}

static int mount_device(const char *name)
{
    char target[32], source[32];
    snprintf(target, sizeof target, "dev/%s", name);
    snprintf(source, sizeof source, "/dev/%s", name);
    int file = open(target, O_CREAT | O_WRONLY | O_CLOEXEC, 0666);
    if (file < 0)
        return fail_errno("%s", target);
    close(file);
    int tree = clone_tree(AT_HERE, source, false);
    if (tree < 0 || attach(tree, target))
        return -1;
    close(tree);
    return 0;
}

static int mount_devices(int64_t shm)
{
    static const char *const names[] = {"null", "zero", "full", "random", "urandom", "tty"};
    static const char *const links[][2] = {
        {"/proc/self/fd", "dev/fd"}, {"/proc/self/fd/0", "dev/stdin"}, {"/proc/self/fd/1", "dev/stdout"},
        {"/proc/self/fd/2", "dev/stderr"}, {"pts/ptmx", "dev/ptmx"},
    };
    char options[80];
    if (mount_at("tmpfs", "dev", MS_NOSUID | MS_NOEXEC, "mode=755,size=4194304,nr_inodes=64"))
        return -1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (mount_device(names[i]))
            return -1;
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        if (symlink(links[i][0], links[i][1]))
            return fail_errno("%s", links[i][1]);
    if (mkdir("dev/pts", 0755) || mkdir("dev/shm", 01777))
        return fail_errno("make directories in /dev");
    if (mount_at("devpts", "dev/pts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,max=128"))
        return -1;
    snprintf(options, sizeof options, "mode=1777,size=%lld,nr_inodes=4096", (long long)shm);
    return mount_at("tmpfs", "dev/shm", MS_NOSUID | MS_NODEV, options);
}

/* ------------------------------------------------------------------------------------------------ network */

static int add_address(int control, struct span value, int index)
{
    struct ifreq request = {0};
    struct sockaddr_in where = {.sin_family = AF_INET};
    char text[64];
    if (!text_of(value, text, sizeof text) || inet_pton(AF_INET, text, &where.sin_addr) != 1)
        return fail(EINVAL, "an address in the request is no IPv4 address");
    snprintf(request.ifr_name, sizeof request.ifr_name, "lo:%d", index);
    memcpy(&request.ifr_addr, &where, sizeof where);
    return ioctl(control, SIOCSIFADDR, &request) ? fail_errno("add address %s", text) : 0;
}

/* Open a socket of `kind address port` for the host's egress proxy. */
static int open_listen(struct span value)
{
    char text[128], kind[8], address[64];
    unsigned port;
    struct sockaddr_in where = {.sin_family = AF_INET};
    if (!text_of(value, text, sizeof text) || sscanf(text, "%7s %63s %u", kind, address, &port) != 3 || port > 65535 ||
        inet_pton(AF_INET, address, &where.sin_addr) != 1)
        return fail(EINVAL, "a listening socket in the request is not `kind address port`");
    if (guest.egress_count == (int)(sizeof guest.egress_sockets / sizeof *guest.egress_sockets))
        return fail(EINVAL, "more than %d listening sockets", guest.egress_count);
    where.sin_port = htons((uint16_t)port);
    bool stream = !strcmp(kind, "tcp");
    int fd = socket(AF_INET, (stream ? SOCK_STREAM : SOCK_DGRAM) | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&where, sizeof where) || (stream && listen(fd, 128)))
        return fail_errno("listen on %s", text);
    guest.egress_sockets[guest.egress_count++] = fd;
    return 0;
}

/* Bring up loopback, the only interface, and open the sockets that the host's egress proxy serves. */
static int open_network(const struct request *spec)
{
    struct ifreq up = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    struct span value;
    int key, index = 0;
    int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (control < 0 || ioctl(control, SIOCSIFFLAGS, &up))
        return fail_errno("bring up the loopback interface");
    for (size_t at = 0; next_field(spec, &at, &key, &value);)
        if (key == ZYGOTE_ADDRESS && add_address(control, value, ++index))
            return -1;
    close(control);
    for (size_t at = 0; next_field(spec, &at, &key, &value);)
        if (key == ZYGOTE_LISTEN && open_listen(value))
            return -1;
    return 0;
}

/* ------------------------------------------------------------------------------------------------ privileges */

/* Leave other pods of the same user, and that user, most of its watches of files. */
static int share_watches(void)
{
    static const char *const limits[][2] = {
        {"inotify/max_user_instances", "max_inotify_instances"}, {"inotify/max_user_watches", "max_inotify_watches"},
        {"fanotify/max_user_groups", "max_fanotify_groups"}, {"fanotify/max_user_marks", "max_fanotify_marks"}};
    char path[80], text[32] = "";
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        snprintf(path, sizeof path, "/proc/sys/fs/%s", limits[i][0]);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t size = file < 0 ? -1 : read(file, text, sizeof text - 1);
        close(file);
        if (size <= 0)
            continue; /* not in this kernel */
        text[size] = 0;
        size = snprintf(text, sizeof text, "%ld", atol(text) / WATCHES_SHARE + 1);
        snprintf(path, sizeof path, "proc/sys/user/%s", limits[i][1]);
        if (write_to(path, text, (size_t)size))
            return -1;
    }
    return 0;
}

/* Become root of the new namespaces, mount the root file system and pivot into it. */
static int enter(const struct request *spec, bool own_ids)
{
    char hostname[65];
    struct span name = field(spec, ZYGOTE_HOSTNAME);
    if (unshare(CLONE_NEWCGROUP))
        return fail_errno("enter a cgroup namespace");
    if (syscall(SYS_setgroups, 0, NULL) && errno != EPERM) /* denied where one id is mapped; there are no groups then */
        return fail_errno("drop groups");
    if (syscall(SYS_setresgid, 0, 0, 0) || syscall(SYS_setresuid, 0, 0, 0))
        return fail_errno("become the pod's root");
    umask(0);
    if (mount_overlay() || mount_binds() || mount_devices(number(spec, ZYGOTE_SHM, 64 << 20)) ||
        mount_at("proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) || (!own_ids && share_watches()))
        return -1;
    if (syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/"))
        return fail_errno("pivot_root");
    if (!text_of(name.data ? name : span_of("pod"), hostname, sizeof hostname) ||
        sethostname(hostname, strlen(hostname)))
        return fail_errno("set the host name");
    umask(022);
    return 0;
}

/* Inheritable stays empty (CVE-2022-24769 in Docker). */
int drop_capabilities(uint64_t keep, bool bounding)
{
    struct { uint32_t version; int pid; } header = {0x20080522, 0};
    struct { uint32_t effective, permitted, inheritable; } sets[2];
    for (int number = 0, held; bounding && number < 64 && (held = prctl(PR_CAPBSET_READ, number, 0, 0, 0)) >= 0; number++)
        if (held && !(keep >> number & 1) && prctl(PR_CAPBSET_DROP, number, 0, 0, 0))
            return fail_errno("drop capability %d", number);
    if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0))
        return fail_errno("clear the ambient capabilities");
    if (syscall(SYS_capget, &header, sets))
        return fail_errno("read the capabilities");
    for (int i = 0; i < 2; i++) {
        sets[i].effective = sets[i].permitted &= (uint32_t)(keep >> 32 * i);
        sets[i].inheritable = 0;
    }
    return syscall(SYS_capset, &header, sets) ? fail_errno("set the capabilities") : 0;
}

int install_filter(struct span program, unsigned flags)
{
    struct { unsigned short length; const void *filter; } description = {
        (unsigned short)(program.size / 8), program.data};
    if (!program.size || program.size % 8 || program.size / 8 > 4096)
        return fail(EINVAL, "seccomp: %u bytes are not a filter", program.size);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        return fail_errno("set no-new-privileges");
    int result = (int)syscall(SYS_seccomp, 1, flags, &description);
    return result < 0 ? fail_errno("the kernel rejected the filter") : result;
}

void exit_if_orphaned(const struct pod_setup *setup)
{
    struct pollfd liveness = {.fd = setup->liveness};
    if (poll(&liveness, 1, 0) > 0)
        _exit(1);
}

int lower_limit(int kind, rlim_t most)
{
    struct rlimit limit;
    if (getrlimit(kind, &limit))
        return fail_errno("read a limit");
    limit.rlim_max = limit.rlim_max < most ? limit.rlim_max : most;
    limit.rlim_cur = limit.rlim_cur < limit.rlim_max ? limit.rlim_cur : limit.rlim_max;
    return setrlimit(kind, &limit) ? fail_errno("set a limit") : 0;
}

int limit_user(bool own_user, int64_t pids)
{
    if (pids && lower_limit(RLIMIT_NPROC, (rlim_t)pids))
        return -1;
    return own_user ? 0 : lower_limit(RLIMIT_SIGPENDING, SIGNALS) || lower_limit(RLIMIT_MSGQUEUE, 0) ? -1 : 0;
}

/* Restrict this process irreversibly; the pod's programs inherit the restrictions. */
static int drop_privileges(const struct request *spec, const struct pod_setup *setup)
{
    int kept[MAX_FDS + 1], count = guest.egress_count;
    /* Again: the change to the pod's root cleared it. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0))
        return fail_errno("set the parent death signal");
    exit_if_orphaned(setup);
    memcpy(kept, guest.egress_sockets, (size_t)count * sizeof *kept);
    kept[count++] = setup->listener;
    close_others(kept, count);
    /* Not dumpable: the pod's root has our uid, and must not trace us or open /proc/1/mem. */
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
        return fail_errno("become not dumpable");
    if (limit_user(setup->own_ids, number(spec, ZYGOTE_PIDS, 0)))
        return -1;
    if (drop_capabilities((uint64_t)number(spec, ZYGOTE_CAPS, 0), true))
        return -1;
    return install_filter(field(spec, ZYGOTE_FILTER), SYNC_THREADS) < 0 ? -1 : 0;
}

/* Send the first client that connects the reason why the pod could not be created. */
static void report_failure(int listener)
{
    struct pollfd waiting = {.fd = listener, .events = POLLIN};
    struct buffer reply = {0};
    put_failure(&reply, 0);
    int peer = poll(&waiting, 1, REPORT_MS) > 0 ? accept4(listener, NULL, NULL, SOCK_CLOEXEC) : -1;
    if (peer >= 0 && !reply.failed)
        send(peer, reply.data, reply.size, MSG_NOSIGNAL);
    _exit(1);
}

void run_pod(const struct request *spec, struct pod_setup *setup)
{
    char go;
    int64_t flags = number(spec, ZYGOTE_FLAGS, 0);
    int failed = 0;
    guest.listener = setup->listener, guest.channel = setup->channel, guest.program_files = setup->files;
    prctl(PR_SET_NAME, "agent", 0, 0, 0); /* visible in the pod, so it does not change */
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    struct span workdir = field(spec, ZYGOTE_WORKDIR);
    guest.adjust_oom_score = flags & ADJUST_OOM_SCORE;
    guest.zygote_opens_terminals = flags & ZYGOTE_OPENS_TERMINALS;
    if (!text_of(workdir.data ? workdir : span_of("/"), guest.workdir, sizeof guest.workdir))
        failed = fail(EINVAL, "the working directory is no path");
    bool namespaces = zygote.namespaces;
    /* While the zygote maps our ids: neither call needs them, and this saves a tenth of a millisecond. */
    failed = failed || (namespaces && (open_sources(spec, setup->own_ids) || open_network(spec)));
    if (setup->proxy >= 0)
        guest.egress_sockets[guest.egress_count++] = setup->proxy;
    if (read(setup->go, &go, 1) != 1)
        _exit(1);
    setup->workdir = guest.workdir;
    if (failed || (namespaces ? enter(spec, setup->own_ids) || drop_privileges(spec, setup) : enter_directory(spec, setup)))
        report_failure(setup->listener);
    /* The zygote's log is a file of the host: its name would show in /proc/1/fd. */
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0)
        _exit(1);
    close(null);
    serve_guest();
    _exit(0);
}
