/* The processes of pods: created by the zygote, known to it until they are killed, and reaped by it. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "processes.h"
#include "zygote.h"

/* The cgroup namespace follows when the process is in its groups: its root is where its creator is. */
static const unsigned long NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC |
                                        CLONE_NEWUTS;
static const uint64_t INTO_CGROUP = 0x200000000ull;

#ifndef SYS_clone3
#define SYS_clone3 435
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

/* -------------------------------------------------------------------------------------------- finding, ending */

struct pod *find_pod(const char *name)
{
    for (struct pod *pod = zygote.pods; pod; pod = pod->next)
        if (!strcmp(pod->name, name))
            return pod;
    return NULL;
}

void drop_pod(struct pod *pod)
{
    for (struct pod **at = &zygote.pods; *at; at = &(*at)->next)
        if (*at == pod) {
            *at = pod->next;
            break;
        }
    if (pod->tree >= 0 && pod->on_disk)
        close_in_child(pod->tree);
    else if (pod->tree >= 0)
        close(pod->tree);
    if (pod->channel >= 0)
        close(pod->channel);
    free(pod->group);
    free(pod);
}

/* Kill what ended pods without namespaces left to us. */
static int kill_strays(void)
{
    size_t count = 0;
    for (struct pod *pod = zygote.pods; pod; pod = pod->next)
        count += 3;
    pid_t *kept = malloc((count + 1) * sizeof *kept);
    if (!kept)
        return fail(ENOMEM, "%s", error_text(ENOMEM));
    count = 0;
    for (struct pod *pod = zygote.pods; pod; pod = pod->next) {
        if (pod->alive)
            kept[count++] = pod->pid;
        if (pod->broker > 0)
            kept[count++] = pod->broker;
        if (pod->watcher > 0)
            kept[count++] = pod->watcher;
    }
    int left = kill_descendants(getpid(), kept, count);
    free(kept);
    return left > 0 ? fail(EBUSY, "%d processes of an ended pod could not be killed", left) : left;
}

static void kill_and_wait(pid_t pid)
{
    kill(pid, SIGKILL);
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        ;
}

/* Kill a pod's first process. In a PID namespace the kernel kills the rest before that one can be waited for. */
int end_pod(struct pod *pod)
{
    char path[PATH_MAX];
    if (!zygote.namespaces && pod->group) {
        /* Kills all at once, including processes being forked or frozen, where the kernel has it (5.14). */
        snprintf(path, sizeof path, "%s/cgroup.kill", pod->group);
        write_to(path, "1", 1);
    }
    if (pod->alive)
        kill_and_wait(pod->pid);
    if (pod->broker > 0)
        kill_and_wait(pod->broker);
    if (pod->watcher > 0)
        kill_and_wait(pod->watcher);
    pod->alive = false, pod->broker = pod->watcher = 0;
    return zygote.namespaces ? 0 : kill_strays();
}

/* Reap pods that ended by themselves. They stay known until killed, so that their writes can be sealed. */
void reap_pods(void)
{
    pid_t pid;
    while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
        for (struct pod *pod = zygote.pods; pod; pod = pod->next) {
            if (pod->pid == pid)
                pod->alive = false;
            if (pod->broker == pid)
                pod->broker = 0;
            if (pod->watcher == pid)
                pod->watcher = 0;
        }
    if (!zygote.namespaces && kill_strays()) /* repeated with the next SIGCHLD; must not affect the other pods */
        fprintf(stderr, "zygote: %s\n", last_error.text);
}

/* ---------------------------------------------------------------------------------------------- creating */

/* Set the id maps and control groups of a new process, and let it continue. */
static int configure_child(const struct request *r, pid_t pid, int go, bool moved, const struct ids *ids)
{
    struct span value;
    char path[PATH_MAX], text[16];
    int key;
    if (ids && map_ids(pid, ids))
        return -1;
    int size = snprintf(text, sizeof text, "%d", (int)pid);
    for (size_t at = 0; next_field(r, &at, &key, &value);)
        if (key == ZYGOTE_CGROUP || (key == ZYGOTE_GROUP && !moved)) {
            if (!text_of(value, path, sizeof path - 16))
                return fail(EINVAL, "a control group file is no path");
            if (key == ZYGOTE_GROUP)
                strcat(path, "/cgroup.procs");
            if (write_to(path, text, (size_t)size))
                return -1;
        }
    return write(go, "g", 1) == 1 ? 0 : fail_errno("start the pod");
}

/* Fork, into new namespaces where pods have them, without a new stack, and directly into a v2 control group: moving a running process there
 * costs an RCU grace period. Where that is not possible, `*moved` stays false. */
static pid_t clone_into(const struct request *r, bool *moved)
{
    char path[PATH_MAX];
    unsigned long flags = zygote.namespaces ? NAMESPACES : 0;
    struct span group = field(r, ZYGOTE_GROUP);
    if (group.data && text_of(group, path, sizeof path)) {
        int directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (directory >= 0) {
            uint64_t arguments[11] = {
                [0] = (uint64_t)flags | INTO_CGROUP, [4] = SIGCHLD, [10] = (uint64_t)directory};
            pid_t pid = (pid_t)syscall(SYS_clone3, arguments, sizeof arguments);
            close(directory);
            if (pid >= 0) {
                *moved = true;
                return pid;
            }
        }
    }
    return (pid_t)syscall(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0);
}

/* Change the effective user; files are still accessed as root. */
static int change_user(uid_t user)
{
    int failed = (int)syscall(SYS_setresuid, -1, user, -1);
    syscall(SYS_setfsuid, 0);
    return failed;
}

/* Clone the first process of a pod; return its pid or -1. The child sets itself up; this does not wait for it. */
pid_t clone_pod(const struct request *r, struct pod_setup *setup, const struct ids *ids)
{
    int go[2];
    if (pipe2(go, O_CLOEXEC))
        return fail_errno("make a pipe");
    bool moved = false;
    /* What a user namespace uses of inotify, signals and the like is charged to the user that created it, too. */
    bool as_pod = ids && ids->own && zygote.keeps_capabilities && !change_user(ids->first);
    pid_t pid = clone_into(r, &moved);
    if (as_pod && pid != 0)
        change_user(0);
    if (pid == 0) {
        close(go[1]);
        close(zygote.liveness_w);
        setup->go = go[0];
        run_pod(r, setup);
    }
    if (pid < 0)
        fail_errno("clone into new namespaces");
    else if (configure_child(r, pid, go[1], moved, ids)) {
        kill_and_wait(pid);
        pid = -1;
    }
    close(go[0]);
    close(go[1]);
    return pid;
}

/* Create the processes of a pod without namespaces: its first one, our channel to it, and with egress its broker. */
int fork_pod(struct pod *pod, const struct request *r, struct pod_setup *setup)
{
    int channel[2] = {-1, -1}, broker[2] = {-1, -1};
    pid_t parent = getpid();
    struct span group = field(r, ZYGOTE_GROUP);
    int failed = socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, channel) ||
                 (setup->proxy >= 0 && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, broker));
    if (failed)
        fail_errno("make a pair of sockets");
    setup->channel = channel[1], setup->broker = broker[0], pod->channel = channel[0];
    if (!failed && setup->proxy >= 0 && !(pod->broker = fork()))
        run_broker(r, broker[1], parent);
    pod->pid = failed ? -1 : clone_pod(r, setup, NULL);
    pod->group = group.data ? strndup((const char *)group.data, group.size) : NULL;
    for (int i = 0; i < 2; i++)
        if (broker[i] >= 0)
            close(broker[i]);
    if (channel[1] >= 0)
        close(channel[1]);
    if (pod->pid < 0 && pod->broker > 0)
        kill_and_wait(pod->broker);
    return pod->pid < 0 ? -1 : 0;
}

int watch_pod(struct pod *pod, const struct request *r)
{
    pid_t parent = getpid();
    if (!field(r, ZYGOTE_WATCH).data)
        return 0;
    int pidfd = (int)syscall(SYS_pidfd_open, pod->pid, 0);
    if (pidfd < 0)
        return fail_errno("watch a pod");
    if ((pod->watcher = fork()) == 0)
        run_watcher(r, pod, pidfd, parent);
    int failed = pod->watcher < 0 ? fail_errno("fork the watcher of a pod") : 0;
    close(pidfd);
    return failed;
}
