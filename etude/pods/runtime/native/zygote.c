/* The zygote of a state directory: the process that all its pods are cloned from, and their parent.
 *
 *     zygote < "LISTENER_FD\nDIRECTORY\nMODE\n"        zygote --version
 *
 * It handles the requests of zygote_protocol.py one by one, makes no policy decisions, has one thread, and exits when
 * it holds no pod and no layer. It never waits for a pod's setup, nor long for a client. Its modes:
 *
 * `namespaces`: it runs in a mount namespace of its own, where layers in memory and id-mapped layers are mounted: when it
 * dies, these mounts and every pod go with it.
 * `processes`: pods have no namespaces. It is two processes: the worker handles requests, and its parent, the guard, only
 * waits. Both are subreapers, and so is every guest init: whatever a program does (fork, setsid, double fork), it stays a
 * descendant of its guest init, and becomes a child of the worker when the guest init dies. A child of the worker that
 * is no guest init is a leftover, and is killed with its descendants. When the worker is killed the guard does the
 * same; when the guard is, the worker ends everything.
 * `guest`: no zygote, but the guest init of a pod without isolation, which works in the directory.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>

#include "init.h"
#include "processes.h"
#include "zygote.h"

enum {
    IDLE_MS = 30000, /* until it exits without pods, layers and connections */
    MAX_CONNECTIONS = 256,
    MAX_DESCRIPTORS = 8, /* of one message */
    NAME = 200,          /* bytes of the name of a pod or layer */
    MAP_TEXT = 4096,
    SEND_S = 5,          /* for a client to take its reply */
};

static const unsigned long NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC |
                                        CLONE_NEWUTS | CLONE_NEWCGROUP;
static const uint64_t INTO_CGROUP = 0x200000000ull;

#ifndef SYS_clone3
#define SYS_clone3 435
#endif

struct error last_error;

/* A created pod: its first process and the tmpfs it writes to; without namespaces its broker and our channel to it. */
struct pod {
    struct pod *next;
    char name[NAME];
    pid_t pid, broker;
    int tree, channel; /* or -1 */
    bool alive;
    char *group; /* its v2 control group, or NULL */
};

/* A mounted layer. */
struct layer {
    struct layer *next;
    char name[NAME];
};

/* A user namespace for id-mapping. */
struct mapping {
    struct mapping *next;
    char maps[MAP_TEXT];
    int fd;
};

struct connection {
    int fd;
    struct buffer received;
    int descriptors[MAX_DESCRIPTORS], descriptor_count;
};

static struct {
    int listener, signals, liveness_w;
    struct pod_setup setup;
    struct pod *pods;
    struct layer *memory, *mapped;
    struct mapping *mappings;
    struct connection connections[MAX_CONNECTIONS];
    int connected;
    bool namespaces, running;
} zygote;

/* The contents of an OK reply. */
struct reply {
    struct buffer *to;
    int fd; /* a descriptor to send, or -1 */
};

/* ------------------------------------------------------------------------------------------------- names */

/* Get the name of a pod or layer, checked to be safe as a directory name. */
static int name_of(const struct request *r, int key, char name[NAME])
{
    struct span value = field(r, key);
    if (!value.size || !text_of(value, name, NAME) || strchr(name, '/') || !strcmp(name, ".") || !strcmp(name, ".."))
        return fail(EINVAL, "a pod or layer is named by 1 to %d bytes without a slash", NAME - 1);
    return 0;
}

static struct pod *find_pod(const char *name)
{
    for (struct pod *pod = zygote.pods; pod; pod = pod->next)
        if (!strcmp(pod->name, name))
            return pod;
    return NULL;
}

static struct layer **find_layer(struct layer **list, const char *name)
{
    while (*list && strcmp((*list)->name, name) != 0)
        list = &(*list)->next;
    return list;
}

static int add_layer(struct layer **list, const char *name)
{
    struct layer *layer = calloc(1, sizeof *layer);
    if (!layer)
        return fail(ENOMEM, "%s", error_text(ENOMEM));
    strcpy(layer->name, name);
    layer->next = *list;
    *list = layer;
    return 0;
}

static void drop_pod(struct pod *pod)
{
    for (struct pod **at = &zygote.pods; *at; at = &(*at)->next)
        if (*at == pod) {
            *at = pod->next;
            break;
        }
    if (pod->tree >= 0)
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
        count += 2;
    pid_t *kept = malloc((count + 1) * sizeof *kept);
    if (!kept)
        return fail(ENOMEM, "%s", error_text(ENOMEM));
    count = 0;
    for (struct pod *pod = zygote.pods; pod; pod = pod->next) {
        if (pod->alive)
            kept[count++] = pod->pid;
        if (pod->broker > 0)
            kept[count++] = pod->broker;
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
static int end_pod(struct pod *pod)
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
    pod->alive = false, pod->broker = 0;
    return zygote.namespaces ? 0 : kill_strays();
}

/* Reap pods that ended by themselves. They stay known until killed, so that their writes can be sealed. */
static void reap(void)
{
    pid_t pid;
    while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
        for (struct pod *pod = zygote.pods; pod; pod = pod->next) {
            if (pod->pid == pid)
                pod->alive = false;
            if (pod->broker == pid)
                pod->broker = 0;
        }
    if (!zygote.namespaces && kill_strays()) /* repeated with the next SIGCHLD; must not affect the other pods */
        fprintf(stderr, "zygote: %s\n", last_error.text);
}

/* ---------------------------------------------------------------------------------------------- creating */

/* Set the id maps and control groups of a new process, and let it continue. */
static int configure_child(const struct request *r, pid_t pid, int go, bool moved)
{
    struct span uids = field(r, ZYGOTE_UIDMAP), gids = field(r, ZYGOTE_GIDMAP), value;
    char path[PATH_MAX], text[16];
    int key;
    if (zygote.namespaces && write_map(pid, "uid_map", uids.data, uids.size))
        return -1;
    if (zygote.namespaces && (getuid() || (gids.data && memmem(gids.data, gids.size, " 1\n", 3))) &&
        write_map(pid, "setgroups", "deny", 4))
        return -1;
    if (zygote.namespaces && write_map(pid, "gid_map", gids.data, gids.size))
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

/* Clone the first process of a pod; return its pid or -1. The child sets itself up; this does not wait for it. */
static pid_t clone_pod(const struct request *r, struct pod_setup *setup)
{
    int go[2];
    if (pipe2(go, O_CLOEXEC))
        return fail_errno("make a pipe");
    bool moved = false;
    pid_t pid = clone_into(r, &moved);
    if (pid == 0) {
        close(go[1]);
        close(zygote.liveness_w);
        setup->go = go[0];
        run_pod(r, setup);
    }
    if (pid < 0)
        fail_errno("clone into new namespaces");
    else if (configure_child(r, pid, go[1], moved)) {
        kill_and_wait(pid);
        pid = -1;
    }
    close(go[0]);
    close(go[1]);
    return pid;
}

/* Create the processes of a pod without namespaces: its first one, our channel to it, and with egress its broker. */
static int fork_pod(struct pod *pod, const struct request *r, struct pod_setup *setup)
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
    pod->pid = failed ? -1 : clone_pod(r, setup);
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

static int create(const struct request *r, const int *descriptors, struct reply *reply)
{
    char name[NAME];
    struct pod_setup setup = zygote.setup;
    if (name_of(r, ZYGOTE_ID, name))
        return -1;
    if (find_pod(name) || descriptors[0] < 0)
        return fail(EINVAL, "pod %s exists already, or no socket came with it", name);
    struct pod *pod = calloc(1, sizeof *pod);
    if (!pod)
        return fail(ENOMEM, "%s", error_text(ENOMEM));
    setup.listener = descriptors[0], setup.proxy = descriptors[1], setup.channel = setup.broker = -1;
    pod->tree = pod->channel = -1;
    if (!zygote.namespaces) {
        fork_pod(pod, r, &setup);
    } else if (field(r, ZYGOTE_UPPER).data) {
        pod->pid = clone_pod(r, &setup);
    } else {
        pod->tree = stage_memory(r);
        pod->pid = pod->tree < 0 ? -1 : clone_pod(r, &setup);
        if (pod->tree >= 0)
            umount2(STAGE, MNT_DETACH);
    }
    if (pod->pid < 0) {
        drop_pod(pod);
        return -1;
    }
    strcpy(pod->name, name);
    pod->alive = true;
    pod->next = zygote.pods;
    zygote.pods = pod;
    put_number(reply->to, ZYGOTE_PID, pod->pid);
    return 0;
}

/* ------------------------------------------------------------------------------------------------ requests */

static int kill_pod(const struct request *r, const int *descriptors, struct reply *reply)
{
    char name[NAME];
    (void)descriptors, (void)reply;
    struct pod *pod = name_of(r, ZYGOTE_ID, name) ? NULL : find_pod(name);
    int failed = pod ? end_pod(pod) : 0; /* without one, it has already ended */
    if (pod && !failed)
        drop_pod(pod);
    return failed;
}

static int seal(const struct request *r, const int *descriptors, struct reply *reply)
{
    char name[NAME], layer[NAME], path[NAME + 16];
    (void)descriptors, (void)reply;
    if (name_of(r, ZYGOTE_ID, name) || name_of(r, ZYGOTE_LAYER, layer))
        return -1;
    struct pod *pod = find_pod(name);
    if (!pod || pod->tree < 0)
        return fail(ENOENT, "pod %s writes nothing to memory here", name);
    end_pod(pod);
    snprintf(path, sizeof path, MEMORY "/%s", layer);
    if (mkdir(path, 0700))
        return fail_errno("%s", path); /* the pod stays known, with its writes */
    if (attach(pod->tree, path)) {
        rmdir(path);
        return -1;
    }
    if (add_layer(&zygote.memory, layer))
        return -1;
    drop_pod(pod);
    return 0;
}

static int fetch(const struct request *r, const int *descriptors, struct reply *reply)
{
    const int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
    char name[NAME], path[NAME + 16];
    (void)descriptors;
    if (field(r, ZYGOTE_ID).data) {
        if (name_of(r, ZYGOTE_ID, name))
            return -1;
        struct pod *pod = find_pod(name);
        if (!pod || pod->tree < 0)
            return fail(ENOENT, "no such pod, or it does not write to memory");
        reply->fd = openat(pod->tree, "u", flags);
    } else {
        if (name_of(r, ZYGOTE_LAYER, name))
            return -1;
        if (!*find_layer(&zygote.memory, name))
            return fail(ENOENT, "no layer %s in memory", name);
        snprintf(path, sizeof path, MEMORY "/%s/u", name);
        reply->fd = open(path, flags);
    }
    return reply->fd < 0 ? fail_errno("open the writes of %s", name) : 0;
}

static int drop(const struct request *r, const int *descriptors, struct reply *reply)
{
    struct { struct layer **known; const char *directory; } kinds[] = {
        {&zygote.memory, MEMORY}, {&zygote.mapped, MAPPED}};
    char name[NAME], path[NAME + 16];
    (void)descriptors, (void)reply;
    if (name_of(r, ZYGOTE_LAYER, name))
        return -1;
    for (int i = 0; i < 2; i++) {
        struct layer **at = find_layer(kinds[i].known, name), *layer = *at;
        if (!layer)
            continue;
        *at = layer->next;
        free(layer);
        snprintf(path, sizeof path, "%s/%s", kinds[i].directory, name);
        if (umount2(path, MNT_DETACH) || rmdir(path))
            return fail_errno("unmount %s", path);
    }
    return 0;
}

/* Return a user namespace with the request's id maps; one is created for each pair of maps. */
static int find_namespace(const struct request *r)
{
    struct span uids = field(r, ZYGOTE_UIDMAP), gids = field(r, ZYGOTE_GIDMAP);
    char maps[MAP_TEXT];
    size_t half = sizeof maps / 2;
    if (!uids.size || !gids.size || !text_of(uids, maps, half) || !text_of(gids, maps + uids.size, half))
        return fail(EINVAL, "no id maps, or too long ones");
    for (struct mapping *known = zygote.mappings; known; known = known->next)
        if (!strcmp(known->maps, maps))
            return known->fd;
    struct mapping *fresh = calloc(1, sizeof *fresh);
    if (!fresh)
        return fail(ENOMEM, "%s", error_text(ENOMEM));
    if ((fresh->fd = user_namespace(uids, gids)) < 0) {
        free(fresh);
        return -1;
    }
    strcpy(fresh->maps, maps);
    fresh->next = zygote.mappings;
    zygote.mappings = fresh;
    return fresh->fd;
}

/* Mount a layer with the owners that a pod's user namespace expects. */
static int map_layer(const struct request *r, const int *descriptors, struct reply *reply)
{
    char name[NAME], target[NAME + 16], path[PATH_MAX];
    (void)descriptors, (void)reply;
    if (name_of(r, ZYGOTE_LAYER, name))
        return -1;
    if (*find_layer(&zygote.mapped, name))
        return 0;
    if (!text_of(field(r, ZYGOTE_PATH), path, sizeof path) || !*path)
        return fail(EINVAL, "the layer has no path");
    int namespace = find_namespace(r);
    if (namespace < 0)
        return -1;
    snprintf(target, sizeof target, MAPPED "/%s", name);
    if (mkdir(target, 0700) && errno != EEXIST)
        return fail_errno("%s", target);
    int tree = clone_tree(AT_HERE, path, false);
    if (tree < 0)
        return -1;
    int failed = set_attributes(tree, ATTR_IDMAP | ATTR_RDONLY, false, namespace) || attach(tree, target);
    close(tree);
    return failed ? -1 : add_layer(&zygote.mapped, name);
}

static int status(const struct request *r, const int *descriptors, struct reply *reply)
{
    (void)r, (void)descriptors;
    reap();
    for (struct pod *pod = zygote.pods; pod; pod = pod->next)
        if (pod->alive)
            put_text(reply->to, ZYGOTE_ID, pod->name);
    for (struct layer *layer = zygote.memory; layer; layer = layer->next)
        put_text(reply->to, ZYGOTE_LAYER, layer->name);
    return 0;
}

static int stop(const struct request *r, const int *descriptors, struct reply *reply)
{
    (void)r, (void)descriptors, (void)reply;
    zygote.running = false;
    return 0;
}

/* ------------------------------------------------------------------------------------------- connections */

/* Send a reply, waiting up to SEND_S; false when it could not be sent. */
static bool send_reply(int socket, struct buffer *reply, int fd)
{
    while (reply->size) {
        ssize_t sent = send_fds(socket, bytes(reply), reply->size, &fd, fd >= 0);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return false;
        consume(reply, (size_t)sent);
        fd = -1;
    }
    return !reply->failed;
}

typedef int (*handler)(const struct request *, const int *descriptors, struct reply *);

static bool dispatch(struct connection *from, const struct request *r)
{
    static const handler handlers[] = {create, kill_pod, seal, fetch, drop, map_layer, status, stop};
    struct buffer frame = {0};
    struct reply reply = {&frame, -1};
    int descriptors[2] = {-1, -1}, *pending = from->descriptors;
    int wanted = r->op != CREATE ? 0 : field(r, ZYGOTE_PORT).data ? 2 : 1;
    wanted = wanted < from->descriptor_count ? wanted : from->descriptor_count;
    memcpy(descriptors, pending, (size_t)wanted * sizeof(int));
    memmove(pending, pending + wanted, (size_t)(from->descriptor_count -= wanted) * sizeof(int));
    size_t mark = begin_frame(&frame, OK, r->call);
    int failed = r->op < CREATE || r->op > STOP ? fail(EINVAL, "unknown request %d", r->op)
                                                 : handlers[r->op - CREATE](r, descriptors, &reply);
    if (failed) {
        frame.size = 0;
        put_failure(&frame, r->call);
    } else {
        end_frame(&frame, mark);
    }
    for (int i = 0; i < wanted; i++)
        close(descriptors[i]);
    bool sent = send_reply(from->fd, &frame, reply.fd);
    if (reply.fd >= 0)
        close(reply.fd);
    clear_buffer(&frame);
    return sent;
}

/* Read once and handle the complete requests; false when the connection has ended. */
static bool handle_requests(struct connection *from)
{
    static uint8_t scratch[1 << 16];
    ssize_t size = receive_fds(
        from->fd, scratch, sizeof scratch, from->descriptors, &from->descriptor_count, MAX_DESCRIPTORS, MSG_DONTWAIT);
    if (size < 0)
        return errno == EAGAIN || errno == EINTR;
    append(&from->received, scratch, (size_t)size);
    if (size == 0 || from->received.failed)
        return false;
    struct request request;
    size_t taken;
    int found;
    while ((found = split_frame(bytes(&from->received), from->received.size, &request, &taken)) > 0) {
        if (!dispatch(from, &request))
            return false;
        consume(&from->received, taken);
    }
    return found == 0;
}

static void close_connection(int index)
{
    struct connection *gone = &zygote.connections[index];
    for (int i = 0; i < gone->descriptor_count; i++)
        close(gone->descriptors[i]);
    close(gone->fd);
    clear_buffer(&gone->received);
    *gone = zygote.connections[--zygote.connected];
}

static void accept_connection(void)
{
    const struct timeval timeout = {.tv_sec = SEND_S};
    int fd = accept4(zygote.listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) {
        usleep(5000); /* no descriptors left: do not spin until there are */
        return;
    }
    if (zygote.connected == MAX_CONNECTIONS) {
        close(fd);
        return;
    }
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
    zygote.connections[zygote.connected++] = (struct connection){.fd = fd};
}

/* Do for a guest init what it may not do itself: `p` counts its processes, `k` kills them, `t` opens a terminal. */
static void handle_guest(struct pod *pod)
{
    char what;
    int ends[2];
    ssize_t size = recv(pod->channel, &what, 1, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (size == 1 && what == 't') {
        int opened = open_terminal(ends) ? 0 : 2;
        send_fds(pod->channel, "t", 1, ends, opened);
        for (int i = 0; i < opened; i++)
            close(ends[i]);
    } else if (size == 1) {
        int32_t count = what == 'k' ? kill_descendants(pod->pid, NULL, 0) : visit_descendants(pod->pid, NULL, 0, 0);
        send(pod->channel, &count, sizeof count, MSG_NOSIGNAL | MSG_DONTWAIT);
    } else {
        close(pod->channel);
        pod->channel = -1;
    }
}

/* Wait for events and handle them; return false when there is no memory to wait with. */
static bool serve_once(bool busy)
{
    static struct pollfd *waiting;
    struct signalfd_siginfo info;
    int connected = zygote.connected, count = 2 + connected, at;
    for (struct pod *pod = zygote.pods; pod; pod = pod->next)
        count += pod->channel >= 0;
    struct pollfd *grown = realloc(waiting, (size_t)count * sizeof *waiting);
    if (!grown)
        return false;
    waiting = grown;
    waiting[0] = (struct pollfd){.fd = zygote.listener, .events = POLLIN};
    waiting[1] = (struct pollfd){.fd = zygote.signals, .events = POLLIN};
    for (int i = 0; i < connected; i++)
        waiting[2 + i] = (struct pollfd){.fd = zygote.connections[i].fd, .events = POLLIN};
    at = 2 + connected;
    for (struct pod *pod = zygote.pods; pod; pod = pod->next)
        if (pod->channel >= 0)
            waiting[at++] = (struct pollfd){.fd = pod->channel, .events = POLLIN};
    if (poll(waiting, (nfds_t)count, busy ? -1 : 1000) <= 0)
        return true;
    at = 2 + connected;
    for (struct pod *pod = zygote.pods; pod; pod = pod->next) /* first: requests change the list of pods */
        if (pod->channel >= 0 && waiting[at++].revents)
            handle_guest(pod);
    if (waiting[1].revents) {
        while (read(zygote.signals, &info, sizeof info) > 0)
            zygote.running = zygote.running && info.ssi_signo == SIGCHLD;
        reap();
    }
    for (int i = connected - 1; i >= 0 && zygote.running; i--) /* from the end: a closed one is replaced by the last */
        if (waiting[2 + i].revents && !handle_requests(&zygote.connections[i]))
            close_connection(i);
    if (waiting[0].revents)
        accept_connection();
    return true;
}

static void serve(void)
{
    int64_t idle_since = now_ns();
    zygote.running = true;
    while (zygote.running) {
        bool busy = zygote.pods || zygote.memory || zygote.connected;
        int64_t now = now_ns();
        if (busy)
            idle_since = now;
        if (now - idle_since > (int64_t)IDLE_MS * 1000000 || !serve_once(busy))
            break;
    }
    for (struct pod *pod = zygote.pods; pod; pod = pod->next)
        end_pod(pod);
}

/* ------------------------------------------------------------------------------------------------ starting */

/* Enter a new mount namespace that still follows the host's mounts; without root, a new user namespace too. */
static int unshare_namespaces(void)
{
    uid_t uid = getuid();
    gid_t gid = getgid();
    char text[32];
    if (unshare(CLONE_NEWNS | (uid ? CLONE_NEWUSER : 0)))
        return fail_errno("unshare");
    if (uid) {
        int size = snprintf(text, sizeof text, "0 %u 1\n", uid);
        if (write_to("/proc/self/setgroups", "deny", 4) || write_to("/proc/self/uid_map", text, (size_t)size))
            return -1;
        size = snprintf(text, sizeof text, "0 %u 1\n", gid);
        if (write_to("/proc/self/gid_map", text, (size_t)size))
            return -1;
    }
    return mount("", "/", "", MS_REC | MS_SLAVE, NULL) ? fail_errno("make mounts follow the host's") : 0;
}

/* Fork the worker and wait for it; then kill what it left. The caller's lock is held until no process is left. */
static int guard_worker(void)
{
    pid_t guard = getpid(), worker;
    sigset_t watched;
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    if ((worker = fork()) < 0)
        return fail_errno("fork the worker");
    if (worker == 0) {
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        prctl(PR_SET_PDEATHSIG, SIGTERM, 0, 0, 0);
        if (getppid() == guard)
            serve();
        _exit(0);
    }
    close(zygote.listener); /* no client may reach a zygote that has no worker */
    close(zygote.liveness_w);
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    sigaddset(&watched, SIGTERM);
    while (waitpid(worker, NULL, WNOHANG) == 0)
        if (sigwaitinfo(&watched, NULL) == SIGTERM)
            kill(worker, SIGTERM);
    while (kill_descendants(guard, NULL, 0) > 0)
        ;
    return 0;
}

/* Serve as the guest init of a pod without isolation, and kill all descendants at the end. */
static int serve_unisolated(const char *directory)
{
    guest.listener = zygote.listener, guest.channel = -1;
    fcntl(guest.listener, F_SETFD, FD_CLOEXEC);
    snprintf(guest.workdir, sizeof guest.workdir, "%s", directory);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    serve_guest();
    return kill_descendants(getpid(), NULL, 0);
}

/* Read listener, directory and mode from standard input, because pods can read our command line. */
static int read_arguments(char directory[PATH_MAX], char mode[16])
{
    char text[PATH_MAX + 64], *end;
    size_t size = 0;
    ssize_t got;
    while (size < sizeof text - 1 && (got = read(0, text + size, sizeof text - 1 - size)) > 0)
        size += (size_t)got;
    text[size] = 0;
    long descriptor = strtol(text, &end, 10);
    char *line = *end == '\n' ? strchr(end + 1, '\n') : NULL;
    if (end == text || !line || descriptor < 3 || descriptor > INT_MAX || line - end > PATH_MAX ||
        sscanf(line, " %15s", mode) != 1)
        return fail(EINVAL, "expected `LISTENER_FD\\nDIRECTORY\\nMODE\\n` on standard input");
    *line = 0;
    strcpy(directory, end + 1);
    zygote.listener = (int)descriptor;
    return 0;
}

static int prepare(char *name, const char *directory, bool processes)
{
    int liveness[2], null = open("/dev/null", O_RDWR | O_CLOEXEC);
    struct rlimit files;
    sigset_t blocked;
    /* Overwrite the path of this program, which a pod must not read. Pods see this name, so it does not change. */
    size_t room = strlen(name);
    memset(name, 0, room);
    memcpy(name, "keeper", room < 6 ? room : 6);
    prctl(PR_SET_NAME, "keeper", 0, 0, 0);
    if (null < 0 || dup2(null, 0) < 0 || pipe2(liveness, O_CLOEXEC))
        return fail_errno("prepare descriptors");
    close(null);
    zygote.setup.liveness = liveness[0], zygote.liveness_w = liveness[1];
    if (getrlimit(RLIMIT_NOFILE, &zygote.setup.files))
        return fail_errno("read the limit of open files");
    if (zygote.namespaces || processes) {
        /* Each pod needs a descriptor, and a thousand exceed the usual limit. Pods get the old limit back. */
        files = zygote.setup.files;
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    /* Blocked, not handled: signals are read from a signalfd, and a write to a closed pipe is just an error. */
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGCHLD);
    if (processes)
        sigaddset(&blocked, SIGTERM);
    if ((zygote.signals = signalfd(-1, &blocked, SFD_NONBLOCK | SFD_CLOEXEC)) < 0)
        return fail_errno("watch for ended pods");
    sigaddset(&blocked, SIGPIPE);
    sigprocmask(SIG_SETMASK, &blocked, NULL);
    for (int number = 1; number < 32; number++)
        signal(number, SIG_DFL);
    umask(077);
    if (zygote.namespaces && unshare_namespaces())
        return -1;
    return chdir(directory) ? fail_errno("enter %s", directory) : 0;
}

int main(int count, char **words)
{
    char directory[PATH_MAX], mode[16];
    if (count == 2 && !strcmp(words[1], "--version")) {
        printf("etude zygote, protocol %d\n", PROTOCOL_VERSION);
        return 0;
    }
    int failed = count != 1 ? fail(EINVAL, "takes no arguments but --version") : read_arguments(directory, mode);
    bool processes = !failed && !strcmp(mode, "processes");
    zygote.namespaces = !failed && !strcmp(mode, "namespaces");
    failed = failed || prepare(words[0], directory, processes);
    if (!failed && zygote.namespaces)
        serve();
    else if (!failed)
        failed = processes ? guard_worker() : serve_unisolated(directory);
    if (failed)
        fprintf(stderr, "zygote: %s\n", last_error.text);
    return failed ? 1 : 0;
}
