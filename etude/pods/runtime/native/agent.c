/* The tool server inside a pod, as agent.py: PID 1 there, answering the frames of wire.py on a listening socket.
 *
 * Forked by the keeper, never exec'd. It runs untrusted programs but never trusts them: what they are given are pipes,
 * a session of their own and nothing else. It must never block on them, and no length they choose is ever believed.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "agent.h"

enum {
    HIGH_WATER = 4 << 20,   /* bytes not yet taken by a peer at which its jobs' output is left in their pipes */
    QUEUE_MOST = 64 << 20,  /* bytes not yet taken by a peer at which its requests are left in the socket */
    INPUT_ROOM = 1 << 20,   /* bytes a job has not read yet at which INPUT is no longer answered at once */
    INPUT_MOST = 256 << 20, /* bytes of input a job may have waiting, from a peer that does not wait for answers */
    DRAIN = 1 << 20,        /* bytes read from a pipe after its process ended; a survivor may go on writing for ever */
    READ_SIZE = 1 << 16,
    EVENTS = 64,
};

struct agent agent;

static uint8_t scratch[READ_SIZE]; /* pages of it that were never needed cost nothing */

/* ------------------------------------------------------------------------------------------- descriptors */

enum { NOTHING, LISTENER, SIGNALS, PEER, PIPE };

/* Who a descriptor belongs to. The generation tells an event of a closed one from its successor of the same number. */
static struct watch {
    uint32_t generation;
    uint8_t kind;
    bool known; /* to epoll */
    uint32_t events;
    void *owner;
} *watches;
static int watch_room;

/* Let `fd` belong to somebody; epoll learns of it with the first `listen_for`. */
static int adopt(int fd, int kind, void *owner)
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

/* Be told of these events; errors and hang-ups are always told. */
static int listen_for(int fd, uint32_t events)
{
    struct watch *w = &watches[fd];
    if (w->known && w->events == events)
        return 0;
    struct epoll_event event = {.events = events, .data.u64 = (uint64_t)w->generation << 32 | (uint32_t)fd};
    if (epoll_ctl(agent.epoll, w->known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event))
        return fail_errno("epoll");
    w->known = true, w->events = events;
    return 0;
}

static void release(int fd)
{
    if (watches[fd].known) /* a copy in a child would keep it in the set otherwise */
        epoll_ctl(agent.epoll, EPOLL_CTL_DEL, fd, NULL);
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
            listen_for(job->outputs[i], (stalled ? 0 : EPOLLIN) | (typing ? EPOLLOUT : 0) | (job->left ? EPOLLET : 0));
        }
    if (job->input >= 0 && job->terminal < 0)
        listen_for(job->input, job->pending.size ? EPOLLOUT : 0);
}

/* Whoever waits for answers to INPUT never fills our memory: they come when the job has read most of it. */
static void answer_input(struct job *job)
{
    for (uint32_t call; job->unanswered.size; consume(&job->unanswered, sizeof call)) {
        memcpy(&call, bytes(&job->unanswered), sizeof call);
        if (job->peer)
            put_ok(job->peer, call);
    }
}

static void forget_pipe(struct job *job, int fd)
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
        empty(&job->pending);
        answer_input(job);
    }
    release(fd);
}

static void forget_pipes(struct job *job)
{
    forget_pipe(job, job->input);
    forget_pipe(job, job->outputs[0]);
    forget_pipe(job, job->outputs[1]);
}

/* Give a job what it will take of its input; wait for room for the rest. */
static void feed(struct job *job)
{
    while (job->pending.size) {
        ssize_t size = write(job->input, bytes(&job->pending), job->pending.size);
        if (size >= 0) {
            consume(&job->pending, (size_t)size);
        } else if (errno == EAGAIN) {
            break;
        } else if (errno != EINTR) { /* it closed its end: the rest is of no use */
            empty(&job->pending);
            job->input_ends = job->terminal < 0;
        }
    }
    if (job->pending.size <= INPUT_ROOM)
        answer_input(job);
    if (job->terminal < 0 && !job->pending.size && job->input_ends)
        forget_pipe(job, job->input);
    else
        watch_job(job);
}

/* Read once and pass it on; 0 at the end, -1 when there is nothing now. */
static ssize_t take(struct job *job, int which)
{
    ssize_t size = read(job->outputs[which], scratch, sizeof scratch);
    if (size < 0)
        return errno == EAGAIN || errno == EINTR ? -1 : 0; /* EIO: the last holder of a terminal closed it */
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

static void move_pipe(int fd, struct job *job, uint32_t events)
{
    bool is_output = fd == job->outputs[0] || fd == job->outputs[1];
    if (fd == job->input && (events & EPOLLOUT || !is_output)) {
        if (events & EPOLLERR && !(events & EPOLLOUT)) {
            forget_pipe(job, fd);
            return;
        }
        feed(job);
    }
    if (!is_output || !(events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        return;
    ssize_t size = take(job, fd == job->outputs[1]);
    if (fd == job->terminal && size >= 0) {
        /* Nobody has the terminal open now. Closing our end would kill the program, which may just be ending, or open
         * it again; so wait for a change, and drain at its end. */
        job->left = size == 0;
        watch_job(job);
    } else if (size == 0) {
        forget_pipe(job, fd);
    }
}

static void unlink_job(struct job *job)
{
    for (struct job **at = &agent.jobs; *at; at = &(*at)->next)
        if (*at == job) {
            *at = job->next;
            break;
        }
}

static int64_t microseconds(struct timeval time)
{
    return (int64_t)time.tv_sec * 1000000 + time.tv_usec;
}

/* The main process ended; take what is in the pipes already and report. Nobody waits for survivors. */
static void finish(struct job *job, int status, const struct rusage *usage)
{
    for (int i = 0; i < 2; i++) {
        ssize_t size;
        for (ssize_t taken = 0; job->outputs[i] >= 0 && taken < DRAIN && (size = take(job, i)) > 0;)
            taken += size;
    }
    forget_pipes(job);
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
    empty(&job->unanswered);
    free(job);
}

/* Wait for everything that ended: our jobs, and orphans, which would otherwise fill the pod with zombies. */
static void reap(void)
{
    struct rusage usage;
    int status;
    pid_t pid;
    while ((pid = wait4(-1, &status, WNOHANG, &usage)) > 0 || (pid < 0 && errno == EINTR))
        for (struct job *job = agent.jobs; job; job = job->next)
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

/* Make our ends non-blocking and known to the loop. */
static int adopt_pipes(struct job *job)
{
    int ours[3] = {job->input, job->outputs[0], job->outputs[1]};
    for (int i = 0; i < 3; i++)
        if (ours[i] >= 0) {
            if (adopt(ours[i], PIPE, job))
                return -1;
            fcntl(ours[i], F_SETFL, fcntl(ours[i], F_GETFL) | O_NONBLOCK);
        }
    return 0;
}

static int spawn(struct peer *peer, const struct request *r)
{
    struct span given = field(r, DATA);
    int64_t flags = number(r, FLAGS, 0), time = number(r, TIME, 0);
    struct job *job = calloc(1, sizeof *job);
    if (!job)
        return fail(ENOMEM, "%s", error_text(ENOMEM));
    *job = (struct job){.peer = peer, .call = r->call, .limit = number(r, LIMIT, 0), .started = now_ns()};
    job->input = job->outputs[0] = job->outputs[1] = job->terminal = -1;
    int theirs[3] = {-1, -1, -1};
    int failed;
    if (field(r, ROWS).data) {
        failed = open_terminal(&job->terminal, &theirs[0]);
        job->input = job->outputs[0] = job->terminal;
        if (!failed) {
            set_size(job->terminal, number(r, ROWS, 0), number(r, COLS, 0));
            job->pid = start_program(r, theirs[0], theirs[0], theirs[0], true);
        }
    } else {
        failed = open_pipes(job, theirs, given.size || flags & KEEP_STDIN);
        if (!failed)
            job->pid = start_program(r, theirs[0] < 0 ? agent.null : theirs[0], theirs[1], theirs[2], false);
    }
    for (int i = 0; i < 3; i++)
        if (theirs[i] >= 0)
            close(theirs[i]);
    if (!failed && job->pid > 0 && adopt_pipes(job)) {
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
    job->next = agent.jobs;
    agent.jobs = job;
    size_t mark = begin_frame(&peer->queue, STARTED, r->call);
    put_number(&peer->queue, PID, job->pid);
    end_frame(&peer->queue, mark);
    watch_job(job);
    if (job->input >= 0 && job->terminal < 0) {
        append(&job->pending, given.data, given.size);
        job->input_ends = !(flags & KEEP_STDIN);
        feed(job);
    }
    return 0;
}

static struct job *job_of(struct peer *peer, const struct request *r)
{
    int64_t call = number(r, JOB, 0);
    for (struct job *job = agent.jobs; job; job = job->next)
        if (job->peer == peer && job->call == call)
            return job;
    fail(ESRCH, "no such job, or it has ended");
    return NULL;
}

static int give_input(struct peer *peer, const struct request *r)
{
    struct job *job = job_of(peer, r);
    struct span data = field(r, DATA);
    if (!job)
        return -1;
    if (job->input < 0)
        return fail(EPIPE, "its standard input is closed");
    if (job->pending.size + job->unanswered.size + data.size > INPUT_MOST)
        return fail(ENOBUFS, "%d bytes of input wait for it already", INPUT_MOST);
    append(&job->pending, data.data, data.size);
    if (number(r, FLAGS, 0) & END) {
        if (job->terminal >= 0)
            append(&job->pending, "\x04", 1);
        else
            job->input_ends = true;
    }
    append(&job->unanswered, &r->call, sizeof r->call);
    if (job->pending.failed || job->unanswered.failed) {
        job->pending.failed = job->unanswered.failed = false;
        return fail(ENOMEM, "%s", error_text(ENOMEM));
    }
    feed(job);
    return 0;
}

static int send_signal(struct peer *peer, const struct request *r)
{
    struct job *job = job_of(peer, r);
    int64_t number_asked = number(r, NUMBER, 0);
    if (!job)
        return -1;
    if (number_asked < 0 || number_asked > 64)
        return fail(EINVAL, "%s", error_text(EINVAL));
    if (kill(-job->pid, (int)number_asked))
        return fail(errno, "%s", error_text(errno));
    put_ok(peer, r->call);
    return 0;
}

static int resize(struct peer *peer, const struct request *r)
{
    struct job *job = job_of(peer, r);
    if (!job)
        return -1;
    if (job->terminal < 0)
        return fail(ENOTTY, "it has no terminal");
    set_size(job->terminal, number(r, ROWS, 0), number(r, COLS, 0));
    put_ok(peer, r->call);
    return 0;
}

static int own(struct peer *peer, const struct request *r)
{
    int64_t time = number(r, TIME, 0);
    agent.owner = number(r, FLAGS, 0) & ATTACHED ? peer : NULL;
    agent.deadline = time ? after_ms(now_ns(), time) : 0;
    put_ok(peer, r->call);
    return 0;
}

static bool is_dead(const char *pid)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%.20s/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return true;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    text[size < 0 ? 0 : size] = 0;
    const char *end = strrchr(text, ')'); /* a name may hold anything, so the state is behind the last bracket */
    return !end || !end[1] || end[2] == 'Z' || end[2] == 'X';
}

int other_processes(void)
{
    int count = 0;
    DIR *directory = opendir("/proc");
    if (!directory)
        return fail_errno("list the processes");
    for (struct dirent *entry; (entry = readdir(directory));)
        if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && strcmp(entry->d_name, "1") != 0)
            count += !is_dead(entry->d_name);
    closedir(directory);
    return count;
}

static int count_processes(struct peer *peer, const struct request *r)
{
    int count = other_processes();
    if (count < 0)
        return -1;
    size_t mark = begin_frame(&peer->queue, OK, r->call);
    put_number(&peer->queue, SIZE, count);
    end_frame(&peer->queue, mark);
    return 0;
}

/* As PID 1, kill(-1) reaches every process of the pod but us. Elsewhere it would reach the host's: never there. */
static int kill_all(struct peer *peer, const struct request *r)
{
    int64_t deadline = now_ns() + 5000000000;
    if (getpid() != 1)
        return fail(EPERM, "%s", error_text(EPERM));
    while (other_processes() > 0 && now_ns() < deadline) { /* one sweep can miss a fork in flight */
        kill(-1, SIGKILL);
        reap();
        sched_yield();
    }
    reap();
    put_ok(peer, r->call);
    return 0;
}

static int ping(struct peer *peer, const struct request *r)
{
    put_ok(peer, r->call);
    return 0;
}

typedef int (*answerer)(struct peer *, const struct request *);
static const answerer answers[] = {
    [PING] = ping,         [SPAWN] = spawn,         [INPUT] = give_input,      [SIGNAL] = send_signal,
    [RESIZE] = resize,     [READ] = read_file,      [WRITE] = write_file,      [LIST] = list_directory,
    [STAT] = stat_path,    [REMOVE] = remove_path,  [MKDIR] = make_directory,  [SYMLINK] = make_link,
    [OWN] = own,           [PROCESSES] = count_processes,                      [KILLALL] = kill_all,
};

static void answer(struct peer *peer, const struct request *r)
{
    int failed;
    if (r->op >= (int)(sizeof answers / sizeof *answers) || !answers[r->op])
        failed = fail(ENOSYS, "unknown request %d", r->op);
    else
        failed = answers[r->op](peer, r);
    if (failed)
        put_failure(&peer->queue, r->call);
}

/* --------------------------------------------------------------------------------------------------- peers */

/* A connection ended: so do the jobs nobody can hear any more, and the pod if this was its owner. */
static void part(struct peer *peer)
{
    for (struct job *job = agent.jobs; job; job = job->next)
        if (job->peer == peer) {
            kill(-job->pid, SIGKILL);
            job->peer = NULL;
            forget_pipes(job);
        }
    for (struct peer **at = &agent.peers; *at; at = &(*at)->next)
        if (*at == peer) {
            *at = peer->next;
            break;
        }
    if (peer == agent.owner) {
        agent.owner = NULL;
        agent.running = false;
    }
    release(peer->fd);
    empty(&peer->received);
    empty(&peer->queue);
    free(peer);
}

/* The sockets opened for egress travel with the greeting, so that whoever takes the pod over can carry them. */
static int greet(int fd)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof agent.carried)];
    } control;
    struct buffer hello = {0};
    size_t mark = begin_frame(&hello, HELLO, 0);
    put_number(&hello, NUMBER, WIRE_VERSION);
    put_text(&hello, PATH, agent.workdir);
    end_frame(&hello, mark);
    struct iovec data = {hello.data, hello.size};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
    if (agent.carried_count) {
        size_t size = (size_t)agent.carried_count * sizeof(int);
        memset(&control, 0, sizeof control);
        message.msg_control = &control, message.msg_controllen = CMSG_SPACE(size);
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET, head->cmsg_type = SCM_RIGHTS, head->cmsg_len = CMSG_LEN(size);
        memcpy(CMSG_DATA(head), agent.carried, size);
    }
    bool sent = !hello.failed && sendmsg(fd, &message, MSG_NOSIGNAL) == (ssize_t)hello.size;
    empty(&hello);
    return sent ? 0 : -1;
}

static void accept_peer(void)
{
    int fd = accept4(agent.listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
        if (errno != EAGAIN && errno != ECONNABORTED)
            usleep(5000); /* no descriptors left: do not spin until there are */
        return;
    }
    struct peer *peer = calloc(1, sizeof *peer);
    if (!peer || greet(fd) || adopt(fd, PEER, peer)) { /* gone already is no news */
        free(peer);
        close(fd);
        return;
    }
    peer->fd = fd;
    peer->next = agent.peers;
    agent.peers = peer;
    listen_for(fd, EPOLLIN);
}

/* Send what the socket takes; false when the peer is of no more use. */
static bool flush(struct peer *peer)
{
    while (peer->queue.size) {
        ssize_t size = send(peer->fd, bytes(&peer->queue), peer->queue.size, MSG_NOSIGNAL);
        if (size >= 0)
            consume(&peer->queue, (size_t)size);
        else if (errno == EAGAIN)
            break;
        else if (errno != EINTR)
            empty(&peer->queue); /* the reading side will see the end */
    }
    if (peer->queue.failed)
        return false;
    bool stalled = peer->queue.size > HIGH_WATER;
    listen_for(peer->fd, (peer->queue.size < QUEUE_MOST ? EPOLLIN : 0) | (peer->queue.size ? EPOLLOUT : 0));
    if (stalled != peer->stalled) {
        peer->stalled = stalled;
        for (struct job *job = agent.jobs; job; job = job->next)
            if (job->peer == peer)
                watch_job(job);
    }
    return true;
}

/* Answer the whole frames at the front; the bytes they took, or -1 when this is not the protocol. */
static ssize_t answer_frames(struct peer *peer, const uint8_t *data, size_t size)
{
    struct request request;
    size_t done = 0, taken;
    int found;
    while ((found = split_frame(data + done, size - done, &request, &taken)) > 0) {
        answer(peer, &request);
        done += taken;
    }
    return found < 0 ? -1 : (ssize_t)done;
}

static void exchange(struct peer *peer, uint32_t events)
{
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        return;
    ssize_t size = recv(peer->fd, scratch, sizeof scratch, 0);
    if (size < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (size <= 0) {
        part(peer);
        return;
    }
    /* Always through the peer's own buffer: answering uses the scratch one. */
    append(&peer->received, scratch, (size_t)size);
    ssize_t done = peer->received.failed ? -1 : answer_frames(peer, bytes(&peer->received), peer->received.size);
    if (done >= 0) {
        consume(&peer->received, (size_t)done);
        return;
    }
    flush(peer); /* what was asked properly before is answered */
    part(peer);
}

/* ---------------------------------------------------------------------------------------------- the loop */

/* Milliseconds until a deadline, or -1. */
static int patience(void)
{
    int64_t end = agent.deadline;
    for (struct job *job = agent.jobs; job; job = job->next)
        if (job->deadline && (!end || job->deadline < end))
            end = job->deadline;
    if (!end)
        return -1;
    int64_t left = (end - now_ns() + 999999) / 1000000;
    return left < 0 ? 0 : left > 1000000 ? 1000000 : (int)left;
}

static void expire(void)
{
    int64_t now = now_ns();
    if (agent.deadline && now >= agent.deadline)
        agent.running = false;
    for (struct job *job = agent.jobs; job; job = job->next)
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
        return; /* of a descriptor that was closed earlier in this turn */
    switch (w->kind) {
    case LISTENER: accept_peer(); break;
    case SIGNALS:
        while (read(fd, &ignored, sizeof ignored) > 0)
            ;
        break;
    case PEER: exchange(w->owner, events); break;
    case PIPE: move_pipe(fd, w->owner, events); break;
    default: break;
    }
}

/* SIGCHLD and SIGPIPE are blocked by the keeper before any pod is made, so no death is missed before the first turn. */
enum { UNOWNED_MS = 60000 }; /* a pod that nobody has taken by then was made for a service that is dead */

void serve_agent(void)
{
    struct epoll_event events[EVENTS];
    struct stat info;
    sigset_t children;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    agent.epoll = epoll_create1(EPOLL_CLOEXEC);
    agent.signals = signalfd(-1, &children, SFD_NONBLOCK | SFD_CLOEXEC);
    agent.null = open("/dev/null", O_RDWR | O_CLOEXEC);
    agent.has_proc = stat("/proc/1", &info) == 0 && S_ISDIR(info.st_mode) && stat("/proc", &info) == 0;
    agent.proc_device = info.st_dev;
    agent.deadline = after_ms(now_ns(), UNOWNED_MS);
    fcntl(agent.listener, F_SETFL, fcntl(agent.listener, F_GETFL) | O_NONBLOCK);
    if (agent.epoll < 0 || agent.signals < 0 || agent.null < 0 || adopt(agent.listener, LISTENER, NULL) ||
        adopt(agent.signals, SIGNALS, NULL) || listen_for(agent.listener, EPOLLIN) ||
        listen_for(agent.signals, EPOLLIN))
        return;
    agent.running = true;
    while (agent.running) {
        int count = epoll_wait(agent.epoll, events, EVENTS, patience());
        for (int i = 0; i < count; i++)
            handle((int)(uint32_t)events[i].data.u64, (uint32_t)(events[i].data.u64 >> 32), events[i].events);
        reap();
        expire();
        for (struct peer *peer = agent.peers, *next; peer; peer = next) {
            next = peer->next;
            if ((peer->queue.size || peer->stalled || peer->queue.failed) && !flush(peer))
                part(peer);
        }
    }
}
