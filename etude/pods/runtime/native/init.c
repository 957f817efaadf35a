/* The guest init: PID 1 of a pod, serving the requests of guest/protocol.py on a listening socket.
 *
 * Forked by the zygote, or run as it is for a pod without isolation. The programs it runs are untrusted: each gets pipes and a session of its own and
 * nothing else. It must never block on one, and no length that one chooses is trusted.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "init.h"
#include "processes.h"

enum {
    HIGH_WATER = 4 << 20,          /* unsent bytes of a peer above which its jobs' output stays in their pipes */
    MAX_QUEUE = 64 << 20,          /* unsent bytes of a peer above which its requests stay in the socket */
    INPUT_HIGH_WATER = 1 << 20,    /* unread input bytes of a job above which INPUT is acknowledged later */
    MAX_PENDING_INPUT = 256 << 20, /* unread input bytes of a job whose peer does not wait for acknowledgements */
    MAX_DRAIN = 1 << 20,           /* bytes read from a pipe after its process ended; others may write without end */
    READ_SIZE = 1 << 16,
    EVENTS = 64,
};

struct guest_init guest;

static uint8_t scratch[READ_SIZE]; /* its unused pages cost nothing */

/* ------------------------------------------------------------------------------------------- descriptors */

enum { NOTHING, LISTENER, SIGNALS, PEER, PIPE };

/* The owner of a descriptor. The generation distinguishes a closed descriptor from a new one with its number. */
static struct watch {
    uint32_t generation;
    uint8_t kind;
    bool known; /* to epoll */
    uint32_t events;
    void *owner;
} *watches;
static int watch_room;

/* Set the owner of `fd`; the first `watch_fd` adds it to epoll. */
static int register_fd(int fd, int kind, void *owner)
{
    if (fd >= watch_room) {
        int room = watch_room ? watch_room : 32;
        while (room <= fd)
            room *= 2;
        struct watch *grown = realloc(watches, (size_t)room * sizeof *grown);
        if (!grown)
            return fail(ENOMEM, "%s", error_text(ENOMEM));
        memset(grown + watch_room, 0, (size_t)(room - watch_room) * sizeof *grown);
        watches = grown, watch_room = room;
    }
    struct watch *w = &watches[fd];
    *w = (struct watch){.generation = w->generation + 1, .kind = (uint8_t)kind, .owner = owner};
    return 0;
}

/* Watch these events; errors and hangups are always reported. */
static int watch_fd(int fd, uint32_t events)
{
    struct watch *w = &watches[fd];
    if (w->known && w->events == events)
        return 0;
    struct epoll_event event = {.events = events, .data.u64 = (uint64_t)w->generation << 32 | (uint32_t)fd};
    if (epoll_ctl(guest.epoll, w->known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event))
        return fail_errno("epoll");
    w->known = true, w->events = events;
    return 0;
}

static void release_fd(int fd)
{
    if (watches[fd].known) /* a copy in a child would keep it in the set otherwise */
        epoll_ctl(guest.epoll, EPOLL_CTL_DEL, fd, NULL);
    watches[fd].kind = NOTHING, watches[fd].known = false;
    close(fd);
}

/* --------------------------------------------------------------------------------------------------- jobs */

static void watch_job(struct job *job)
{
    bool stalled = job->peer && job->peer->stalled;
    for (int i = 0; i < 2; i++)
        if (job->outputs[i] >= 0) {
            bool typing = job->outputs[i] == job->input && job->pending.size;
            watch_fd(job->outputs[i], (stalled ? 0 : EPOLLIN) | (typing ? EPOLLOUT : 0) | (job->hung_up ? EPOLLET : 0));
        }
    if (job->input >= 0 && job->terminal < 0)
        watch_fd(job->input, job->pending.size ? EPOLLOUT : 0);
}

/* Acknowledge INPUT, once the job has read most of it: a peer that waits for this never fills our memory. */
static void acknowledge_input(struct job *job)
{
    for (uint32_t call; job->unacknowledged.size; consume(&job->unacknowledged, sizeof call)) {
        memcpy(&call, bytes(&job->unacknowledged), sizeof call);
        if (job->peer)
            put_ok(job->peer, call);
    }
}

static void close_pipe(struct job *job, int fd)
{
    if (fd < 0)
        return;
    for (int i = 0; i < 2; i++)
        if (job->outputs[i] == fd)
            job->outputs[i] = -1;
    if (job->terminal == fd)
        job->terminal = -1;
    if (job->input == fd) {
        job->input = -1;
        clear_buffer(&job->pending);
        acknowledge_input(job);
    }
    release_fd(fd);
}

static void close_pipes(struct job *job)
{
    close_pipe(job, job->input);
    close_pipe(job, job->outputs[0]);
    close_pipe(job, job->outputs[1]);
}

/* Write as much pending input as the job takes; wait for space for the rest. */
static void write_input(struct job *job)
{
    while (job->pending.size) {
        ssize_t size = write(job->input, bytes(&job->pending), job->pending.size);
        if (size >= 0) {
            consume(&job->pending, (size_t)size);
        } else if (errno == EAGAIN) {
            break;
        } else if (errno != EINTR) { /* it closed its end: discard the rest */
            clear_buffer(&job->pending);
            job->input_ends = job->terminal < 0;
        }
    }
    if (job->pending.size <= INPUT_HIGH_WATER)
        acknowledge_input(job);
    if (job->terminal < 0 && !job->pending.size && job->input_ends)
        close_pipe(job, job->input);
    else
        watch_job(job);
}

/* Read output once and send it; return its size, 0 at end of file, -1 when there is none now. */
static ssize_t forward_output(struct job *job, int which)
{
    ssize_t size = read(job->outputs[which], scratch, sizeof scratch);
    if (size < 0)
        return errno == EAGAIN || errno == EINTR ? -1 : 0; /* EIO: the last program closed the terminal */
    int64_t room = job->limit ? job->limit - job->sent[which] : size;
    int64_t kept = room < 0 ? 0 : room < size ? room : size;
    if (kept < size)
        job->flags |= TRUNCATED;
    if (kept && job->peer) {
        job->sent[which] += kept;
        size_t mark = begin_frame(&job->peer->queue, which ? ERR : OUT, job->call);
        put_bytes(&job->peer->queue, DATA, scratch, (size_t)kept);
        end_frame(&job->peer->queue, mark);
    }
    return size;
}

static void on_pipe_event(int fd, struct job *job, uint32_t events)
{
    bool is_output = fd == job->outputs[0] || fd == job->outputs[1];
    if (fd == job->input && (events & EPOLLOUT || !is_output)) {
        if (events & EPOLLERR && !(events & EPOLLOUT)) {
            close_pipe(job, fd);
            return;
        }
        write_input(job);
    }
    if (!is_output || !(events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        return;
    ssize_t size = forward_output(job, fd == job->outputs[1]);
    if (fd == job->terminal && size >= 0) {
        /* No program has the terminal open now. Closing our end would kill the program, which may be ending or open it
         * again; so wait for a change, and drain at its end. */
        job->hung_up = size == 0;
        watch_job(job);
    } else if (size == 0) {
        close_pipe(job, fd);
    }
}

static void unlink_job(struct job *job)
{
    for (struct job **at = &guest.jobs; *at; at = &(*at)->next)
        if (*at == job) {
            *at = job->next;
            break;
        }
}

static int64_t microseconds(struct timeval time)
{
    return (int64_t)time.tv_sec * 1000000 + time.tv_usec;
}

/* Send what the pipes still hold and EXITED. Background processes of the job are not waited for. */
static void finish(struct job *job, int status, const struct rusage *usage)
{
    for (int i = 0; i < 2; i++) {
        ssize_t size;
        for (ssize_t taken = 0; job->outputs[i] >= 0 && taken < MAX_DRAIN && (size = forward_output(job, i)) > 0;)
            taken += size;
    }
    close_pipes(job);
    unlink_job(job);
    if (job->peer) {
        struct buffer *queue = &job->peer->queue;
        size_t mark = begin_frame(queue, EXITED, job->call);
        put_number(queue, CODE, WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
        put_number(queue, FLAGS, job->flags);
        put_number(queue, TIME, (now_ns() - job->started) / 1000);
        put_number(queue, UTIME, microseconds(usage->ru_utime));
        put_number(queue, STIME, microseconds(usage->ru_stime));
        put_number(queue, MAXRSS, (int64_t)usage->ru_maxrss << 10);
        end_frame(queue, mark);
    }
    clear_buffer(&job->unacknowledged);
    free(job);
}

/* Reap every ended child: our jobs, and orphans, which would otherwise fill the pod with zombies. */
static void reap(void)
{
    struct rusage usage;
    int status;
    pid_t pid;
    while ((pid = wait4(-1, &status, WNOHANG, &usage)) > 0 || (pid < 0 && errno == EINTR))
        for (struct job *job = guest.jobs; job; job = job->next)
            if (job->pid == pid) {
                finish(job, status, &usage);
                break;
            }
}

/* ----------------------------------------------------------------------------------------------- requests */

void put_ok(struct peer *peer, uint32_t call)
{
    end_frame(&peer->queue, begin_frame(&peer->queue, OK, call));
}

static void set_size(int terminal, int64_t rows, int64_t columns)
{
    struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)columns};
    ioctl(terminal, TIOCSWINSZ, &size);
}

/* Make our ends non-blocking and register them with the event loop. */
static int register_pipes(struct job *job)
{
    int ours[3] = {job->input, job->outputs[0], job->outputs[1]};
    for (int i = 0; i < 3; i++)
        if (ours[i] >= 0) {
            if (register_fd(ours[i], PIPE, job))
                return -1;
            fcntl(ours[i], F_SETFL, fcntl(ours[i], F_GETFL) | O_NONBLOCK);
        }
    return 0;
}

/* Ask the zygote for what a confined guest init may not do: `p` counts its processes, `k` kills them. */
static int ask_zygote(char what)
{
    int32_t count;
    if (send(guest.channel, &what, 1, MSG_NOSIGNAL) != 1 || recv(guest.channel, &count, sizeof count, 0) != sizeof count)
        return fail_errno("ask the zygote");
    return count;
}

/* Ask the zygote for a terminal: /dev/pts also contains the other terminals of the pod's user. */
static int receive_terminal(int ends[2])
{
    int count = 0;
    char byte;
    if (send(guest.channel, "t", 1, MSG_NOSIGNAL) != 1 || receive_fds(guest.channel, &byte, 1, ends, &count, 2, 0) != 1)
        return fail_errno("ask the zygote");
    return count == 2 ? 0 : fail(EIO, "the zygote could not open a terminal");
}

static int spawn(struct peer *peer, const struct request *r)
{
    struct span first_input = field(r, DATA);
    int64_t flags = number(r, FLAGS, 0), time = number(r, TIME, 0);
    struct job *job = calloc(1, sizeof *job);
    if (!job)
        return fail(ENOMEM, "%s", error_text(ENOMEM));
    *job = (struct job){.peer = peer, .call = r->call, .limit = number(r, LIMIT, 0), .started = now_ns()};
    job->input = job->outputs[0] = job->outputs[1] = job->terminal = -1;
    int child_fds[3] = {-1, -1, -1};
    int failed;
    if (field(r, ROWS).data) {
        int ends[2] = {-1, -1};
        failed = guest.zygote_opens_terminals ? receive_terminal(ends) : open_terminal(ends);
        if (!failed) {
            job->input = job->outputs[0] = job->terminal = ends[0], child_fds[0] = ends[1];
            set_size(job->terminal, number(r, ROWS, 0), number(r, COLS, 0));
            job->pid = start_program(r, child_fds[0], child_fds[0], child_fds[0], true);
        }
    } else {
        failed = open_pipes(job, child_fds, first_input.size || flags & KEEP_STDIN);
        if (!failed)
            job->pid =
                start_program(r, child_fds[0] < 0 ? guest.null : child_fds[0], child_fds[1], child_fds[2], false);
    }
    for (int i = 0; i < 3; i++)
        if (child_fds[i] >= 0)
            close(child_fds[i]);
    if (!failed && job->pid > 0 && register_pipes(job)) {
        kill(-job->pid, SIGKILL); /* out of memory; the orphan is reaped later */
        failed = -1;
    }
    if (failed || job->pid < 0) {
        for (int i = 0; i < 2; i++)
            if (job->outputs[i] >= 0)
                close(job->outputs[i]);
        if (job->input >= 0 && job->terminal < 0)
            close(job->input);
        free(job);
        return -1;
    }
    job->deadline = time ? after_ms(job->started, time) : 0;
    job->next = guest.jobs;
    guest.jobs = job;
    size_t mark = begin_frame(&peer->queue, STARTED, r->call);
    put_number(&peer->queue, PID, job->pid);
    end_frame(&peer->queue, mark);
    watch_job(job);
    if (job->input >= 0 && job->terminal < 0) {
        append(&job->pending, first_input.data, first_input.size);
        job->input_ends = !(flags & KEEP_STDIN);
        write_input(job);
    }
    return 0;
}

static struct job *find_job(struct peer *peer, const struct request *r)
{
    int64_t call = number(r, JOB, 0);
    for (struct job *job = guest.jobs; job; job = job->next)
        if (job->peer == peer && job->call == call)
            return job;
    fail(ESRCH, "no such job, or it has ended");
    return NULL;
}

static int queue_input(struct peer *peer, const struct request *r)
{
    struct job *job = find_job(peer, r);
    struct span data = field(r, DATA);
    if (!job)
        return -1;
    if (job->input < 0)
        return fail(EPIPE, "its standard input is closed");
    if (job->pending.size + job->unacknowledged.size + data.size > MAX_PENDING_INPUT)
        return fail(ENOBUFS, "%d bytes of input wait for it already", MAX_PENDING_INPUT);
    append(&job->pending, data.data, data.size);
    if (number(r, FLAGS, 0) & END) {
        if (job->terminal >= 0)
            append(&job->pending, "\x04", 1);
        else
            job->input_ends = true;
    }
    append(&job->unacknowledged, &r->call, sizeof r->call);
    if (job->pending.failed || job->unacknowledged.failed) {
        job->pending.failed = job->unacknowledged.failed = false;
        return fail(ENOMEM, "%s", error_text(ENOMEM));
    }
    write_input(job);
    return 0;
}

static int send_signal(struct peer *peer, const struct request *r)
{
    struct job *job = find_job(peer, r);
    int64_t signal_number = number(r, NUMBER, 0);
    if (!job)
        return -1;
    if (signal_number < 0 || signal_number > 64)
        return fail(EINVAL, "%s", error_text(EINVAL));
    if (kill(-job->pid, (int)signal_number))
        return fail(errno, "%s", error_text(errno));
    put_ok(peer, r->call);
    return 0;
}

static int resize(struct peer *peer, const struct request *r)
{
    struct job *job = find_job(peer, r);
    if (!job)
        return -1;
    if (job->terminal < 0)
        return fail(ENOTTY, "it has no terminal");
    set_size(job->terminal, number(r, ROWS, 0), number(r, COLS, 0));
    put_ok(peer, r->call);
    return 0;
}

static int set_owner(struct peer *peer, const struct request *r)
{
    int64_t time = number(r, TIME, 0);
    guest.owner = number(r, FLAGS, 0) & ATTACHED ? peer : NULL;
    guest.deadline = time ? after_ms(now_ns(), time) : 0;
    put_ok(peer, r->call);
    return 0;
}

static int count_processes(struct peer *peer, const struct request *r)
{
    int count = guest.channel >= 0 ? ask_zygote('p') : visit_descendants(getpid(), NULL, 0, 0);
    if (count < 0)
        return -1;
    size_t mark = begin_frame(&peer->queue, OK, r->call);
    put_number(&peer->queue, SIZE, count);
    end_frame(&peer->queue, mark);
    return 0;
}

static int kill_all(struct peer *peer, const struct request *r)
{
    int left = guest.channel >= 0 ? ask_zygote('k') : kill_descendants(getpid(), NULL, 0);
    reap();
    if (left)
        return left < 0 ? -1 : fail(EBUSY, "%d processes could not be killed", left);
    put_ok(peer, r->call);
    return 0;
}

static int ping(struct peer *peer, const struct request *r)
{
    put_ok(peer, r->call);
    return 0;
}

typedef int (*handler)(struct peer *, const struct request *);
static const handler handlers[] = {
    [PING] = ping,         [SPAWN] = spawn,         [INPUT] = queue_input,      [SIGNAL] = send_signal,
    [RESIZE] = resize,     [READ] = read_file,      [WRITE] = write_file,      [LIST] = list_directory,
    [STAT] = stat_path,    [REMOVE] = remove_path,  [MKDIR] = make_directory,  [SYMLINK] = make_link,
    [OWN] = set_owner,           [PROCESSES] = count_processes,                      [KILLALL] = kill_all,
};

static void dispatch(struct peer *peer, const struct request *r)
{
    int failed;
    if (r->op >= (int)(sizeof handlers / sizeof *handlers) || !handlers[r->op])
        failed = fail(ENOSYS, "unknown request %d", r->op);
    else
        failed = handlers[r->op](peer, r);
    if (failed)
        put_failure(&peer->queue, r->call);
}

/* --------------------------------------------------------------------------------------------------- peers */

/* Close a connection and kill its jobs; end the pod if this was its owner. */
static void disconnect(struct peer *peer)
{
    for (struct job *job = guest.jobs; job; job = job->next)
        if (job->peer == peer) {
            kill(-job->pid, SIGKILL);
            job->peer = NULL;
            close_pipes(job);
        }
    for (struct peer **at = &guest.peers; *at; at = &(*at)->next)
        if (*at == peer) {
            *at = peer->next;
            break;
        }
    if (peer == guest.owner) {
        guest.owner = NULL;
        guest.running = false;
    }
    release_fd(peer->fd);
    clear_buffer(&peer->received);
    clear_buffer(&peer->queue);
    free(peer);
}

/* Send HELLO with the egress sockets, so that a service that adopts the pod can serve them. */
static int greet(int fd)
{
    struct buffer hello = {0};
    size_t mark = begin_frame(&hello, HELLO, 0);
    put_number(&hello, NUMBER, PROTOCOL_VERSION);
    put_text(&hello, PATH, guest.workdir);
    end_frame(&hello, mark);
    bool sent = !hello.failed && send_fds(fd, hello.data, hello.size, guest.egress_sockets, guest.egress_count) ==
                                     (ssize_t)hello.size;
    clear_buffer(&hello);
    return sent ? 0 : -1;
}

static void accept_peer(void)
{
    int fd = accept4(guest.listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
        if (errno != EAGAIN && errno != ECONNABORTED)
            usleep(5000); /* no descriptors left: do not spin until there are */
        return;
    }
    struct peer *peer = calloc(1, sizeof *peer);
    if (!peer || greet(fd) || register_fd(fd, PEER, peer)) { /* it may have disconnected already */
        free(peer);
        close(fd);
        return;
    }
    peer->fd = fd;
    peer->next = guest.peers;
    guest.peers = peer;
    watch_fd(fd, EPOLLIN);
}

/* Send as much as the socket takes; false when the peer must be disconnected. */
static bool flush(struct peer *peer)
{
    while (peer->queue.size) {
        ssize_t size = send(peer->fd, bytes(&peer->queue), peer->queue.size, MSG_NOSIGNAL);
        if (size >= 0)
            consume(&peer->queue, (size_t)size);
        else if (errno == EAGAIN)
            break;
        else if (errno != EINTR)
            clear_buffer(&peer->queue); /* the next read reports the disconnect */
    }
    if (peer->queue.failed)
        return false;
    bool stalled = peer->queue.size > HIGH_WATER;
    watch_fd(peer->fd, (peer->queue.size < MAX_QUEUE ? EPOLLIN : 0) | (peer->queue.size ? EPOLLOUT : 0));
    if (stalled != peer->stalled) {
        peer->stalled = stalled;
        for (struct job *job = guest.jobs; job; job = job->next)
            if (job->peer == peer)
                watch_job(job);
    }
    return true;
}

/* Handle the complete frames at the front; return their size, or -1 on a protocol violation. */
static ssize_t dispatch_frames(struct peer *peer, const uint8_t *data, size_t size)
{
    struct request request;
    size_t done = 0, taken;
    int found;
    while ((found = split_frame(data + done, size - done, &request, &taken)) > 0) {
        dispatch(peer, &request);
        done += taken;
    }
    return found < 0 ? -1 : (ssize_t)done;
}

static void on_peer_event(struct peer *peer, uint32_t events)
{
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        return;
    ssize_t size = recv(peer->fd, scratch, sizeof scratch, 0);
    if (size < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (size <= 0) {
        disconnect(peer);
        return;
    }
    /* Always through the peer's own buffer, because handlers use `scratch`. */
    append(&peer->received, scratch, (size_t)size);
    ssize_t done = peer->received.failed ? -1 : dispatch_frames(peer, bytes(&peer->received), peer->received.size);
    if (done >= 0) {
        consume(&peer->received, (size_t)done);
        return;
    }
    flush(peer); /* the replies to the valid requests before */
    disconnect(peer);
}

/* ------------------------------------------------------------------------------------------- event loop */

/* Return the milliseconds until the next deadline, or -1. */
static int poll_timeout(void)
{
    int64_t end = guest.deadline;
    for (struct job *job = guest.jobs; job; job = job->next)
        if (job->deadline && (!end || job->deadline < end))
            end = job->deadline;
    if (!end)
        return -1;
    int64_t left = (end - now_ns() + 999999) / 1000000;
    return left < 0 ? 0 : left > 1000000 ? 1000000 : (int)left;
}

static void enforce_deadlines(void)
{
    int64_t now = now_ns();
    if (guest.deadline && now >= guest.deadline)
        guest.running = false;
    for (struct job *job = guest.jobs; job; job = job->next)
        if (job->deadline && now >= job->deadline) {
            job->deadline = 0;
            job->flags |= TIMED_OUT;
            kill(-job->pid, SIGKILL);
        }
}

static void handle(int fd, uint32_t generation, uint32_t events)
{
    struct watch *w = &watches[fd];
    struct signalfd_siginfo ignored;
    if (w->generation != generation)
        return; /* of a descriptor that was closed earlier in this iteration */
    switch (w->kind) {
    case LISTENER: accept_peer(); break;
    case SIGNALS:
        while (read(fd, &ignored, sizeof ignored) > 0)
            ;
        break;
    case PEER: on_peer_event(w->owner, events); break;
    case PIPE: on_pipe_event(fd, w->owner, events); break;
    default: break;
    }
}

enum { UNCLAIMED_MS = 60000 }; /* a pod not claimed within this time was created for a service that died */

/* SIGCHLD is blocked before the pod is created, so none is missed before the loop starts. Every other signal is blocked
 * from here on: no program may end its pod by one that can be blocked. */
void serve_guest(void)
{
    struct epoll_event events[EVENTS];
    struct stat info;
    sigset_t children, all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    guest.epoll = epoll_create1(EPOLL_CLOEXEC);
    guest.signals = signalfd(-1, &children, SFD_NONBLOCK | SFD_CLOEXEC);
    guest.null = open("/dev/null", O_RDWR | O_CLOEXEC);
    guest.has_proc = stat("/proc/1", &info) == 0 && S_ISDIR(info.st_mode) && stat("/proc", &info) == 0;
    guest.proc_device = info.st_dev;
    guest.deadline = after_ms(now_ns(), UNCLAIMED_MS);
    fcntl(guest.listener, F_SETFL, fcntl(guest.listener, F_GETFL) | O_NONBLOCK);
    if (guest.epoll < 0 || guest.signals < 0 || guest.null < 0 || register_fd(guest.listener, LISTENER, NULL) ||
        register_fd(guest.signals, SIGNALS, NULL) || watch_fd(guest.listener, EPOLLIN) ||
        watch_fd(guest.signals, EPOLLIN))
        return;
    guest.running = true;
    while (guest.running) {
        int count = epoll_wait(guest.epoll, events, EVENTS, poll_timeout());
        for (int i = 0; i < count; i++)
            handle((int)(uint32_t)events[i].data.u64, (uint32_t)(events[i].data.u64 >> 32), events[i].events);
        reap();
        enforce_deadlines();
        for (struct peer *peer = guest.peers, *next; peer; peer = next) {
            next = peer->next;
            if ((peer->queue.size || peer->stalled || peer->queue.failed) && !flush(peer))
                disconnect(peer);
        }
    }
}
