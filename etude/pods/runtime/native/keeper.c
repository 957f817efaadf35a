/* The keeper of a state directory's pods, as keeper.py: the process they are cloned from, and their parent.
 *
 *     keeper < "LISTENER_FD\nSTATE_DIR\n"        keeper --version
 *
 * It answers the requests of plan.py one by one, holds no policy, has one thread, and ends when nothing is left to keep.
 * It lives in a mount namespace of its own, where layers in memory and id-mapped layers are mounted: when it dies, all
 * of that and every pod goes with it. It never waits for a pod to be built, nor for long on whoever asks.
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

#include "keeper.h"

enum {
    IDLE_MS = 30000, /* with nothing to keep and nobody connected */
    CONNECTIONS = 256,
    GIVEN = 8,       /* descriptors that may come with one message */
    NAME = 200,      /* bytes of the name of a pod or layer */
    MAP_TEXT = 4096,
    SEND_S = 5,      /* for an asker to take its answer */
};

static const unsigned long NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC |
                                        CLONE_NEWUTS | CLONE_NEWCGROUP;
static const uint64_t INTO_CGROUP = 0x200000000ull;

#ifndef SYS_clone3
#define SYS_clone3 435
#endif

struct trouble trouble;

/* A pod that was made: its first process, and the tmpfs it writes to, or -1. */
struct pod {
    struct pod *next;
    char name[NAME];
    pid_t pid;
    int tree;
    bool alive;
};

/* A layer mounted here, by its name. */
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
    int given[GIVEN], given_count;
};

static struct {
    int listener, signals, life_w;
    struct birth birth;
    struct pod *pods;
    struct layer *memory, *mapped;
    struct mapping *mappings;
    struct connection connections[CONNECTIONS];
    int connected;
    bool running;
} keeper;

/* What an answer says beside OK. */
struct reply {
    struct buffer *to;
    int passed; /* a descriptor, or -1 */
};

/* ------------------------------------------------------------------------------------------------- names */

/* The name of a pod or a layer, safe as a directory's. */
static int name_of(const struct request *r, int key, char name[NAME])
{
    struct span value = field(r, key);
    if (!value.size || !text_of(value, name, NAME) || strchr(name, '/') || !strcmp(name, ".") || !strcmp(name, ".."))
        return fail(EINVAL, "a pod or layer is named by 1 to %d bytes without a slash", NAME - 1);
    return 0;
}

static struct pod *find_pod(const char *name)
{
    for (struct pod *pod = keeper.pods; pod; pod = pod->next)
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
    for (struct pod **at = &keeper.pods; *at; at = &(*at)->next)
        if (*at == pod) {
            *at = pod->next;
            break;
        }
    if (pod->tree >= 0)
        close(pod->tree);
    free(pod);
}

/* Kill a pod's first process; the kernel kills the rest before that one can be waited for. */
static void end_pod(struct pod *pod)
{
    if (!pod->alive)
        return;
    pod->alive = false;
    kill(pod->pid, SIGKILL);
    while (waitpid(pod->pid, NULL, 0) < 0 && errno == EINTR)
        ;
}

/* A pod that ended by itself stays known, so that what it wrote can still be sealed, until it is killed. */
static void reap(void)
{
    pid_t pid;
    while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
        for (struct pod *pod = keeper.pods; pod; pod = pod->next)
            if (pod->pid == pid)
                pod->alive = false;
}

/* ---------------------------------------------------------------------------------------------- creating */

/* Give a new process its ids and its groups, and let it go on. */
static int identify(const struct request *r, pid_t pid, int go, bool moved)
{
    struct span uids = field(r, PLAN_UIDMAP), gids = field(r, PLAN_GIDMAP), value;
    char path[PATH_MAX], text[16];
    int key;
    if (write_map(pid, "uid_map", uids.data, uids.size))
        return -1;
    if ((getuid() || (gids.data && memmem(gids.data, gids.size, " 1\n", 3))) && write_map(pid, "setgroups", "deny", 4))
        return -1;
    if (write_map(pid, "gid_map", gids.data, gids.size))
        return -1;
    int size = snprintf(text, sizeof text, "%d", (int)pid);
    for (size_t at = 0; next_field(r, &at, &key, &value);)
        if (key == PLAN_CGROUP || (key == PLAN_GROUP && !moved)) {
            if (!text_of(value, path, sizeof path - 16))
                return fail(EINVAL, "a control group file is no path");
            if (key == PLAN_GROUP)
                strcat(path, "/cgroup.procs");
            if (write_to(path, text, (size_t)size))
                return -1;
        }
    return write(go, "g", 1) == 1 ? 0 : fail_errno("start the pod");
}

/* As fork does, but straight into new namespaces, without a stack of its own, and into a v2 control group: to move a
 * running process there costs an RCU grace period. Where that cannot be, `*moved` stays false. */
static pid_t clone_into(const struct request *r, bool *moved)
{
    char path[PATH_MAX];
    struct span group = field(r, PLAN_GROUP);
    if (group.data && text_of(group, path, sizeof path)) {
        int directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (directory >= 0) {
            uint64_t arguments[11] = {[0] = (uint64_t)NAMESPACES | INTO_CGROUP, [4] = SIGCHLD, [10] = (uint64_t)directory};
            pid_t pid = (pid_t)syscall(SYS_clone3, arguments, sizeof arguments);
            close(directory);
            if (pid >= 0) {
                *moved = true;
                return pid;
            }
        }
    }
    return (pid_t)syscall(SYS_clone, NAMESPACES | SIGCHLD, 0, 0, 0, 0);
}

/* Clone the first process of a pod; its pid or -1. It builds its world by itself: nobody waits for it here. */
static pid_t clone_pod(const struct request *r, int listener)
{
    int go[2];
    if (pipe2(go, O_CLOEXEC))
        return fail_errno("make a pipe");
    bool moved = false;
    pid_t pid = clone_into(r, &moved);
    if (pid == 0) {
        struct birth birth = keeper.birth;
        close(go[1]);
        close(keeper.life_w);
        birth.listener = listener, birth.go = go[0];
        be_pod(r, &birth);
    }
    if (pid < 0)
        fail_errno("clone into new namespaces");
    else if (identify(r, pid, go[1], moved)) {
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        pid = -1;
    }
    close(go[0]);
    close(go[1]);
    return pid;
}

static int create(const struct request *r, int given, struct reply *reply)
{
    char name[NAME];
    if (name_of(r, PLAN_ID, name))
        return -1;
    if (find_pod(name) || given < 0)
        return fail(EINVAL, "pod %s exists already, or no socket came with it", name);
    struct pod *pod = calloc(1, sizeof *pod);
    if (!pod)
        return fail(ENOMEM, "%s", error_text(ENOMEM));
    bool in_memory = !field(r, PLAN_UPPER).data;
    pod->tree = in_memory ? stage_memory(r) : -1;
    pod->pid = in_memory && pod->tree < 0 ? -1 : clone_pod(r, given);
    if (pod->tree >= 0)
        umount2(STAGE, MNT_DETACH);
    if (pod->pid < 0) {
        drop_pod(pod);
        return -1;
    }
    strcpy(pod->name, name);
    pod->alive = true;
    pod->next = keeper.pods;
    keeper.pods = pod;
    put_number(reply->to, PLAN_PID, pod->pid);
    return 0;
}

/* ------------------------------------------------------------------------------------------------ requests */

static int kill_pod(const struct request *r, int given, struct reply *reply)
{
    char name[NAME];
    (void)given, (void)reply;
    struct pod *pod = name_of(r, PLAN_ID, name) ? NULL : find_pod(name);
    if (pod) { /* otherwise it is as dead as was asked for */
        end_pod(pod);
        drop_pod(pod);
    }
    return 0;
}

static int seal(const struct request *r, int given, struct reply *reply)
{
    char name[NAME], layer[NAME], place[NAME + 16];
    (void)given, (void)reply;
    if (name_of(r, PLAN_ID, name) || name_of(r, PLAN_LAYER, layer))
        return -1;
    struct pod *pod = find_pod(name);
    if (!pod || pod->tree < 0)
        return fail(ENOENT, "pod %s writes nothing to memory here", name);
    end_pod(pod);
    snprintf(place, sizeof place, MEMORY "/%s", layer);
    if (mkdir(place, 0700))
        return fail_errno("%s", place); /* the pod stays known, and what it wrote with it */
    if (attach(pod->tree, place)) {
        rmdir(place);
        return -1;
    }
    if (add_layer(&keeper.memory, layer))
        return -1;
    drop_pod(pod);
    return 0;
}

static int fetch(const struct request *r, int given, struct reply *reply)
{
    const int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
    char name[NAME], place[NAME + 16];
    (void)given;
    if (field(r, PLAN_ID).data) {
        if (name_of(r, PLAN_ID, name))
            return -1;
        struct pod *pod = find_pod(name);
        if (!pod || pod->tree < 0)
            return fail(ENOENT, "no such pod, or it does not write to memory");
        reply->passed = openat(pod->tree, "u", flags);
    } else {
        if (name_of(r, PLAN_LAYER, name))
            return -1;
        if (!*find_layer(&keeper.memory, name))
            return fail(ENOENT, "no layer %s in memory", name);
        snprintf(place, sizeof place, MEMORY "/%s/u", name);
        reply->passed = open(place, flags);
    }
    return reply->passed < 0 ? fail_errno("open what %s wrote", name) : 0;
}

static int drop(const struct request *r, int given, struct reply *reply)
{
    struct { struct layer **known; const char *directory; } kinds[] = {{&keeper.memory, MEMORY}, {&keeper.mapped, MAPPED}};
    char name[NAME], place[NAME + 16];
    (void)given, (void)reply;
    if (name_of(r, PLAN_LAYER, name))
        return -1;
    for (int i = 0; i < 2; i++) {
        struct layer **at = find_layer(kinds[i].known, name), *layer = *at;
        if (!layer)
            continue;
        *at = layer->next;
        free(layer);
        snprintf(place, sizeof place, "%s/%s", kinds[i].directory, name);
        if (umount2(place, MNT_DETACH) || rmdir(place))
            return fail_errno("unmount %s", place);
    }
    return 0;
}

/* The same for the same maps, made once. */
static int find_namespace(const struct request *r)
{
    struct span uids = field(r, PLAN_UIDMAP), gids = field(r, PLAN_GIDMAP);
    char maps[MAP_TEXT];
    size_t half = sizeof maps / 2;
    if (!uids.size || !gids.size || !text_of(uids, maps, half) || !text_of(gids, maps + uids.size, half))
        return fail(EINVAL, "no id maps, or too long ones");
    for (struct mapping *known = keeper.mappings; known; known = known->next)
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
    fresh->next = keeper.mappings;
    keeper.mappings = fresh;
    return fresh->fd;
}

/* Show a layer with the owners a pod's user namespace expects. */
static int map_layer(const struct request *r, int given, struct reply *reply)
{
    char name[NAME], place[NAME + 16], path[PATH_MAX];
    (void)given, (void)reply;
    if (name_of(r, PLAN_LAYER, name))
        return -1;
    if (*find_layer(&keeper.mapped, name))
        return 0;
    if (!text_of(field(r, PLAN_PATH), path, sizeof path) || !*path)
        return fail(EINVAL, "the layer has no path");
    int namespace = find_namespace(r);
    if (namespace < 0)
        return -1;
    snprintf(place, sizeof place, MAPPED "/%s", name);
    if (mkdir(place, 0700) && errno != EEXIST)
        return fail_errno("%s", place);
    int tree = clone_tree(AT_HERE, path, false);
    if (tree < 0)
        return -1;
    int failed = set_attributes(tree, ATTR_IDMAP | ATTR_RDONLY, false, namespace) || attach(tree, place);
    close(tree);
    return failed ? -1 : add_layer(&keeper.mapped, name);
}

static int status(const struct request *r, int given, struct reply *reply)
{
    (void)r, (void)given;
    reap();
    for (struct pod *pod = keeper.pods; pod; pod = pod->next)
        if (pod->alive)
            put_text(reply->to, PLAN_ID, pod->name);
    for (struct layer *layer = keeper.memory; layer; layer = layer->next)
        put_text(reply->to, PLAN_LAYER, layer->name);
    return 0;
}

static int stop(const struct request *r, int given, struct reply *reply)
{
    (void)r, (void)given, (void)reply;
    keeper.running = false;
    for (struct pod *pod = keeper.pods; pod; pod = pod->next)
        end_pod(pod);
    return 0;
}

/* ------------------------------------------------------------------------------------------- conversations */

/* Send an answer, waiting a little; false when it was not taken. */
static bool send_reply(int fd, struct buffer *reply, int passed)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {0};
    while (reply->size) {
        struct iovec data = {bytes(reply), reply->size};
        struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
        if (passed >= 0) {
            message.msg_control = &control, message.msg_controllen = sizeof control.room;
            struct cmsghdr *head = CMSG_FIRSTHDR(&message);
            head->cmsg_level = SOL_SOCKET, head->cmsg_type = SCM_RIGHTS, head->cmsg_len = CMSG_LEN(sizeof(int));
            memcpy(CMSG_DATA(head), &passed, sizeof passed);
        }
        ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return false;
        consume(reply, (size_t)sent);
        passed = -1;
    }
    return !reply->failed;
}

typedef int (*answerer)(const struct request *, int given, struct reply *);

static bool answer(struct connection *from, const struct request *r)
{
    static const answerer answers[] = {create, kill_pod, seal, fetch, drop, map_layer, status, stop};
    struct buffer frame = {0};
    struct reply reply = {&frame, -1};
    int given = -1;
    if (r->op == CREATE && from->given_count) {
        given = from->given[0];
        memmove(from->given, from->given + 1, (size_t)--from->given_count * sizeof(int));
    }
    size_t mark = begin_frame(&frame, OK, r->call);
    int failed = r->op < CREATE || r->op > STOP ? fail(EINVAL, "unknown request %d", r->op)
                                                 : answers[r->op - CREATE](r, given, &reply);
    if (failed) {
        frame.size = 0;
        put_failure(&frame, r->call);
    } else {
        end_frame(&frame, mark);
    }
    if (given >= 0)
        close(given);
    bool sent = send_reply(from->fd, &frame, reply.passed);
    if (reply.passed >= 0)
        close(reply.passed);
    empty(&frame);
    return sent;
}

/* Take the descriptors of a message; more than we have room for are closed. */
static void take_given(struct connection *from, struct msghdr *message)
{
    for (struct cmsghdr *head = CMSG_FIRSTHDR(message); head; head = CMSG_NXTHDR(message, head)) {
        if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(head) + i * sizeof fd, sizeof fd);
            if (from->given_count < GIVEN)
                from->given[from->given_count++] = fd;
            else
                close(fd);
        }
    }
}

/* Read once and answer what is complete; false when the connection is over. */
static bool exchange(struct connection *from)
{
    static uint8_t scratch[1 << 16];
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(GIVEN * sizeof(int))];
    } control;
    struct iovec data = {scratch, sizeof scratch};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control.room};
    ssize_t size = recvmsg(from->fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (size < 0)
        return errno == EAGAIN || errno == EINTR;
    take_given(from, &message);
    append(&from->received, scratch, (size_t)size);
    if (size == 0 || from->received.failed)
        return false;
    struct request request;
    size_t taken;
    int found;
    while ((found = split_frame(bytes(&from->received), from->received.size, &request, &taken)) > 0) {
        if (!answer(from, &request))
            return false;
        consume(&from->received, taken);
    }
    return found == 0;
}

static void hang_up(int index)
{
    struct connection *gone = &keeper.connections[index];
    for (int i = 0; i < gone->given_count; i++)
        close(gone->given[i]);
    close(gone->fd);
    empty(&gone->received);
    *gone = keeper.connections[--keeper.connected];
}

static void accept_connection(void)
{
    const struct timeval patience = {.tv_sec = SEND_S};
    int fd = accept4(keeper.listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) {
        usleep(5000); /* no descriptors left: do not spin until there are */
        return;
    }
    if (keeper.connected == CONNECTIONS) {
        close(fd);
        return;
    }
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    keeper.connections[keeper.connected++] = (struct connection){.fd = fd};
}

static void serve(void)
{
    struct pollfd waiting[CONNECTIONS + 2];
    struct signalfd_siginfo ignored;
    int64_t quiet_since = now_ns();
    keeper.running = true;
    while (keeper.running) {
        bool busy = keeper.pods || keeper.memory || keeper.connected;
        int64_t now = now_ns();
        if (busy)
            quiet_since = now;
        else if (now - quiet_since > (int64_t)IDLE_MS * 1000000)
            return;
        waiting[0] = (struct pollfd){.fd = keeper.listener, .events = POLLIN};
        waiting[1] = (struct pollfd){.fd = keeper.signals, .events = POLLIN};
        int count = keeper.connected;
        for (int i = 0; i < count; i++)
            waiting[2 + i] = (struct pollfd){.fd = keeper.connections[i].fd, .events = POLLIN};
        if (poll(waiting, (nfds_t)count + 2, busy ? -1 : 1000) <= 0)
            continue;
        if (waiting[1].revents) {
            while (read(keeper.signals, &ignored, sizeof ignored) > 0)
                ;
            reap();
        }
        for (int i = count - 1; i >= 0 && keeper.running; i--) /* from the end: the last takes the place of one that goes */
            if (waiting[2 + i].revents && !exchange(&keeper.connections[i]))
                hang_up(i);
        if (waiting[0].revents)
            accept_connection();
    }
}

/* ------------------------------------------------------------------------------------------------ starting */

/* A mount namespace of our own that still follows the host's mounts; as a user, with a user namespace around it. */
static int own_namespaces(void)
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

/* The listener's number and the state directory, from standard input: pods can read our command line. */
static int read_orders(char state[PATH_MAX])
{
    char text[PATH_MAX + 32], *end;
    size_t size = 0;
    ssize_t got;
    while (size < sizeof text - 1 && (got = read(0, text + size, sizeof text - 1 - size)) > 0)
        size += (size_t)got;
    text[size] = 0;
    long descriptor = strtol(text, &end, 10);
    char *line = *end == '\n' ? strchr(end + 1, '\n') : NULL;
    if (end == text || !line || descriptor < 3 || descriptor > INT_MAX || line - end > PATH_MAX)
        return fail(EINVAL, "expected `LISTENER_FD\\nSTATE_DIR\\n` on standard input");
    *line = 0;
    strcpy(state, end + 1);
    keeper.listener = (int)descriptor;
    return 0;
}

static int prepare(char *name, const char *state)
{
    int life[2], null = open("/dev/null", O_RDWR | O_CLOEXEC);
    struct rlimit files;
    sigset_t blocked;
    size_t room = strlen(name); /* of the path of this program, which a pod must not read */
    memset(name, 0, room);
    memcpy(name, "keeper", room < 6 ? room : 6);
    prctl(PR_SET_NAME, "keeper", 0, 0, 0);
    if (null < 0 || dup2(null, 0) < 0 || pipe2(life, O_CLOEXEC))
        return fail_errno("prepare descriptors");
    close(null);
    keeper.birth.life = life[0], keeper.life_w = life[1];
    /* One descriptor for each pod in memory: a thousand do not fit into the usual limit. Pods get theirs back. */
    if (getrlimit(RLIMIT_NOFILE, &files))
        return fail_errno("read the limit of open files");
    keeper.birth.files = files;
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    /* Blocked, not handled: deaths are read from a descriptor, and a write to a closed pipe is just an error. */
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGCHLD);
    sigaddset(&blocked, SIGPIPE);
    sigprocmask(SIG_SETMASK, &blocked, NULL);
    signal(SIGCHLD, SIG_DFL);
    signal(SIGPIPE, SIG_DFL);
    signal(SIGXFSZ, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    sigdelset(&blocked, SIGPIPE);
    if ((keeper.signals = signalfd(-1, &blocked, SFD_NONBLOCK | SFD_CLOEXEC)) < 0)
        return fail_errno("watch for ended pods");
    umask(077);
    if (own_namespaces())
        return -1;
    return chdir(state) ? fail_errno("enter the state directory") : 0;
}

int main(int count, char **words)
{
    char state[PATH_MAX];
    if (count == 2 && !strcmp(words[1], "--version")) {
        printf("etude keeper, protocol %d\n", WIRE_VERSION);
        return 0;
    }
    if (count != 1 || read_orders(state) || prepare(words[0], state)) {
        fprintf(stderr, "keeper: %s\n", count != 1 ? "takes no arguments but --version" : trouble.text);
        return 1;
    }
    serve();
    return 0;
}
