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
#include <signal.h>
#include <sys/mount.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>

#include "init.h"
#include "processes.h"
#include "zygote.h"

enum {
    IDLE_MS = 30000, /* until it exits without pods, layers and connections */
    SEND_S = 5,      /* for a client to take its reply */
};

struct error last_error;
struct zygote zygote;

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

static struct layer **find_layer(struct layer **list, const char *name)
{
    while (*list && strcmp((*list)->name, name) != 0)
        list = &(*list)->next;
    return list;
}

static int add_layer(struct layer **list, const char *name, bool on_disk)
{
    struct layer *layer = calloc(1, sizeof *layer);
    if (!layer)
        return fail(ENOMEM, "%s", error_text(ENOMEM));
    strcpy(layer->name, name);
    layer->on_disk = on_disk;
    layer->next = *list;
    *list = layer;
    return 0;
}

/* ------------------------------------------------------------------------------------------------ requests */

/* Choose the ids of a new pod: with OWN_IDS the first range that no other pod has. */
static int choose_ids(const struct request *r, struct pod *pod, struct ids *ids)
{
    bool taken[MAX_SLOTS] = {false};
    *ids = (struct ids){
        .first = (uint32_t)number(r, ZYGOTE_OWNER, 0), .count = (uint32_t)number(r, ZYGOTE_IDS, 1), .namespace = -1};
    ids->own = number(r, ZYGOTE_FLAGS, 0) & OWN_IDS;
    for (struct pod *other = zygote.pods; other; other = other->next)
        taken[other->slot] = true;
    while (ids->own && ids->slot < MAX_SLOTS - 1 && taken[ids->slot])
        ids->slot++;
    pod->slot = ids->slot;
    ids->first += (uint32_t)ids->slot * ids->count;
    if (getuid() || ids->count == 1)
        return 0;
    int *namespace = &zygote.namespaces_of[ids->slot];
    if (!*namespace && (*namespace = user_namespace(ids)) < 0) {
        *namespace = 0;
        return -1;
    }
    ids->namespace = *namespace;
    return 0;
}

/* Clone a pod in namespaces; return its pid or -1. */
static pid_t create_isolated(const struct request *r, struct pod *pod, struct pod_setup *setup, int image)
{
    struct ids ids;
    if (choose_ids(r, pod, &ids) || stage_files(r, &ids, image, &pod->tree))
        return -1;
    setup->own_ids = ids.own;
    pid_t pid = clone_pod(r, setup, &ids);
    umount2(STAGE, MNT_DETACH);
    return pid;
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
    setup.listener = descriptors[0], setup.proxy = setup.channel = setup.broker = -1;
    pod->tree = pod->channel = -1;
    pod->on_disk = number(r, ZYGOTE_FLAGS, 0) & DISK_IMAGE;
    if (zygote.namespaces) {
        pod->pid = create_isolated(r, pod, &setup, pod->on_disk ? descriptors[1] : -1);
    } else {
        setup.proxy = descriptors[1];
        fork_pod(pod, r, &setup);
    }
    strcpy(pod->name, name);
    pod->alive = pod->pid > 0;
    if (pod->pid < 0 || watch_pod(pod, r)) {
        end_pod(pod);
        drop_pod(pod);
        return -1;
    }
    pod->next = zygote.pods;
    zygote.pods = pod;
    put_number(reply->to, ZYGOTE_PID, pod->pid);
    return 0;
}

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
    if (add_layer(&zygote.memory, layer, pod->on_disk))
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
    char name[NAME], path[NAME + 16];
    (void)descriptors, (void)reply;
    if (name_of(r, ZYGOTE_LAYER, name))
        return -1;
    struct layer **at = find_layer(&zygote.memory, name), *layer = *at;
    if (!layer)
        return 0;
    *at = layer->next;
    snprintf(path, sizeof path, MEMORY "/%s", name);
    int mounted = layer->on_disk ? open(path, O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;
    free(layer);
    int failed = umount2(path, MNT_DETACH) || rmdir(path) ? fail_errno("unmount %s", path) : 0;
    if (mounted >= 0)
        close_in_child(mounted);
    return failed;
}

static int status(const struct request *r, const int *descriptors, struct reply *reply)
{
    (void)r, (void)descriptors;
    reap_pods();
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
    static const handler handlers[] = {create, kill_pod, seal, fetch, drop, NULL, status, stop};
    struct buffer frame = {0};
    struct reply reply = {&frame, -1};
    int descriptors[2] = {-1, -1}, *pending = from->descriptors;
    bool second = field(r, ZYGOTE_PORT).data || number(r, ZYGOTE_FLAGS, 0) & DISK_IMAGE;
    int wanted = r->op != CREATE ? 0 : second ? 2 : 1;
    wanted = wanted < from->descriptor_count ? wanted : from->descriptor_count;
    memcpy(descriptors, pending, (size_t)wanted * sizeof(int));
    memmove(pending, pending + wanted, (size_t)(from->descriptor_count -= wanted) * sizeof(int));
    size_t mark = begin_frame(&frame, OK, r->call);
    handler handle = r->op < CREATE || r->op > STOP ? NULL : handlers[r->op - CREATE];
    int failed = handle ? handle(r, descriptors, &reply) : fail(EINVAL, "unknown request %d", r->op);
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
        reap_pods();
    }
    for (int i = connected - 1; i >= 0 && zygote.running; i--) /* from the end: a closed one is replaced by the last */
        if (waiting[2 + i].revents && !handle_requests(&zygote.connections[i]))
            close_connection(i);
    if (waiting[0].revents)
        accept_connection();
    return true;
}

void serve_zygote(void)
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

