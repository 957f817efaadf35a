/* The setup of a pod without namespaces: its user and limits, Landlock rules, system-call filters; and its broker.
 *
 * Rules and filters are built by ruleset.py and seccomp.py; here they are only applied. With egress, every connect of
 * the pod is stopped by a filter and handed to the broker, a process outside the pod with the pod's user, which replaces
 * the socket by a connection to the pod's egress proxy. The address that a program names is never read.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>

#include "processes.h"
#include "zygote.h"

enum { SYS_CREATE_RULESET = 444, SYS_ADD_RULE, SYS_RESTRICT_SELF, PATH_BENEATH = 1, CONNECT_S = 5, MAX_TASKS = 4096 };

/* ------------------------------------------------------------------------------------------------ user */

/* Become a pod's own user, without groups, if it has one; this drops the capabilities of root. */
static int become_user(int64_t user)
{
    if (user >= 0 && (syscall(SYS_setgroups, 0, NULL) || syscall(SYS_setresgid, user, user, user) ||
                      syscall(SYS_setresuid, user, user, user)))
        return fail_errno("become the pod's user");
    return prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) ? fail_errno("set the parent death signal") : 0;
}

/* ------------------------------------------------------------------------------------------------ confinement */

/* Apply a Landlock ruleset: its attributes, and for each rule its rights and path. */
static int restrict_files(const struct request *spec, struct span attributes)
{
    struct { uint64_t rights; int32_t parent; } __attribute__((packed)) rule;
    char path[PATH_MAX];
    struct span value;
    int key, ruleset = (int)syscall(SYS_CREATE_RULESET, attributes.data, attributes.size, 0);
    if (ruleset < 0)
        return fail_errno("landlock: cannot create a ruleset");
    for (size_t at = 0; next_field(spec, &at, &key, &value);) {
        if (key != ZYGOTE_RULE)
            continue;
        if (value.size < 8 || !text_of((struct span){value.data + 8, value.size - 8}, path, sizeof path))
            return fail(EINVAL, "landlock: a rule has no path");
        memcpy(&rule.rights, value.data, 8);
        if ((rule.parent = open(path, O_PATH | O_CLOEXEC)) < 0)
            return fail_errno("landlock: cannot open %s", path);
        if (syscall(SYS_ADD_RULE, ruleset, PATH_BENEATH, &rule, 0))
            return fail_errno("landlock: cannot add a rule for %s", path);
        close(rule.parent);
    }
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_RESTRICT_SELF, ruleset, 0))
        return fail_errno("landlock: cannot apply the ruleset");
    close(ruleset);
    return 0;
}

int enter_directory(const struct request *spec, const struct pod_setup *setup)
{
    struct span ruleset = field(spec, ZYGOTE_RULESET);
    int64_t user = number(spec, ZYGOTE_OWNER, -1);
    int kept[] = {setup->listener, setup->proxy, setup->channel, setup->broker};
    setsid();
    if (chdir(setup->workdir))
        return fail_errno("%s", setup->workdir);
    umask(022);
    if (lower_limit(RLIMIT_CORE, 0) || limit_user(user >= 0, user >= 0 ? MAX_TASKS : 0) || become_user(user))
        return -1;
    exit_if_orphaned(setup);
    close_others(kept, 4);
    if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        return fail_errno("become a subreaper");
    if (!ruleset.data)
        return 0;
    /* Not dumpable: the programs have our user, and must not trace us or open our memory. */
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
        return fail_errno("become not dumpable");
    /* The bounding set stays, because cutting it may be forbidden: with no-new-privileges it grants nothing. */
    if (drop_capabilities(0, false) || restrict_files(spec, ruleset))
        return -1;
    int listener = install_filter(field(spec, ZYGOTE_NOTIFY), setup->broker >= 0 ? NEW_LISTENER : 0);
    if (listener < 0)
        return -1;
    if (setup->broker >= 0 && send_fds(setup->broker, "n", 1, &listener, 1) != 1)
        return fail_errno("start the broker");
    if (setup->broker >= 0)
        close(listener), close(setup->broker);
    /* Again: dropping capabilities may have cleared the parent death signal. */
    return install_filter(field(spec, ZYGOTE_FILTER), SYNC_THREADS) < 0 || become_user(-1) ? -1 : 0;
}

/* ------------------------------------------------------------------------------------------------ broker */

/* struct seccomp_notif, seccomp_notif_resp and seccomp_notif_addfd of linux/seccomp.h, and their ioctls */
struct notification {
    uint64_t id;
    uint32_t pid, flags;
    int32_t number;
    uint32_t arch;
    uint64_t instruction, arguments[6];
};
struct answer {
    uint64_t id;
    int64_t value;
    int32_t error;
    uint32_t flags;
};
struct replacement {
    uint64_t id;
    uint32_t flags, source, target, target_flags;
};
static const unsigned long RECEIVE = 0xC0502100, ANSWER = 0xC0182101, REPLACE = 0x40182103;

/* Find whether the caller's socket is blocking; return 0 or the error of the call: only a socket may be replaced. */
static int check_socket(pid_t pid, int fd, bool *blocking)
{
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, fd);
    ssize_t size = readlink(path, text, sizeof text - 1);
    if (size < 0)
        return errno == ENOENT ? EBADF : errno;
    if (strncmp(text, "socket:", 7) != 0)
        return ENOTSOCK;
    snprintf(path, sizeof path, "/proc/%d/fdinfo/%d", (int)pid, fd);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    size = file < 0 ? -1 : read(file, text, sizeof text - 1);
    close(file);
    text[size < 0 ? 0 : size] = 0;
    const char *flags = strstr(text, "flags:");
    *blocking = flags && !(strtol(flags + 6, NULL, 8) & O_NONBLOCK);
    return flags ? 0 : EBADF;
}

/* Return a connection to the egress proxy, or -1. */
static int connect_proxy(int port, bool blocking)
{
    const struct sockaddr_in where = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const struct timeval timeout = {.tv_sec = CONNECT_S}, none = {0};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
    if (connect(fd, (const struct sockaddr *)&where, sizeof where)) {
        int number = errno == EINPROGRESS ? ETIMEDOUT : errno;
        close(fd);
        errno = number;
        return -1;
    }
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &none, sizeof none);
    if (!blocking)
        fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

/* Serve one connect. The caller may be killed at any point: then its id is void, and the ioctls fail. */
static void serve_connect(int listener, int port)
{
    struct notification call = {0};
    bool blocking;
    if (ioctl(listener, RECEIVE, &call))
        return;
    int target = (int)call.arguments[0]; /* an int: ignore the upper half */
    int error = check_socket((pid_t)call.pid, target, &blocking);
    int fresh = error ? -1 : connect_proxy(port, blocking);
    if (!error && fresh < 0)
        error = errno;
    struct replacement with = {call.id, 1 /* at this number */, (uint32_t)fresh, (uint32_t)target, O_CLOEXEC};
    if (!error && ioctl(listener, REPLACE, &with) < 0)
        error = errno;
    if (fresh >= 0)
        close(fresh);
    struct answer answer = {.id = call.id, .error = -error};
    ioctl(listener, ANSWER, &answer);
}

/* As the pod's user, because the kernel shows a process's descriptors only to the same user; outside the pod, so that
 * its programs can neither signal it (Landlock's scope, or another user) nor trace it. */
void run_broker(const struct request *spec, int channel, pid_t parent)
{
    int listener = -1, count = 0, kept[] = {channel};
    char byte;
    setsid();
    close_others(kept, 1);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    if (become_user(number(spec, ZYGOTE_OWNER, -1)) || getppid() != parent ||
        receive_fds(channel, &byte, 1, &listener, &count, 1, 0) != 1 || !count)
        _exit(1);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    close(channel);
    struct pollfd waiting = {.fd = listener, .events = POLLIN};
    while (poll(&waiting, 1, -1) < 0 || waiting.revents & POLLIN)
        serve_connect(listener, (int)number(spec, ZYGOTE_PORT, 0));
    _exit(0); /* no process of the pod is left */
}
