/* The guest init: init.c has the event loop and the jobs, spawn.c starts programs, files.c handles file requests.
 *
 * One thread, no signal handlers, no locks. A request handler adds frames to the peer's queue; the loop sends them.
 */
#ifndef ETUDE_INIT_H
#define ETUDE_INIT_H

#include <limits.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "protocol.h"

/* One connection. */
struct peer {
    struct peer *next;
    int fd;
    struct buffer received, queue;
    bool stalled; /* its queue is so long that its jobs' output stays in their pipes */
};

/* A running command and its descriptors. */
struct job {
    struct job *next;
    struct peer *peer; /* NULL once it has disconnected */
    uint32_t call;
    pid_t pid;
    int outputs[2]; /* standard output, standard error; -1 when closed */
    int64_t sent[2], limit;
    int input;
    bool input_ends;              /* close it when `pending` is empty */
    struct buffer pending;        /* input not yet written to the pipe */
    struct buffer unacknowledged; /* INPUT calls to be answered when it is */
    int terminal;                 /* the same descriptor as input and outputs[0], or -1 */
    bool hung_up;                 /* no program has the terminal open at the moment */
    int flags;
    int64_t started, deadline; /* 0: none */
};

struct guest_init {
    int listener, epoll, signals, null;
    int egress_sockets[64], egress_count;
    char workdir[PATH_MAX];
    struct rlimit program_files; /* how many a program may open */
    int channel; /* to the zygote, for a guest init that may not open /proc; or -1 */
    bool adjust_oom_score, zygote_opens_terminals, running;
    int64_t deadline; /* 0: none */
    struct peer *owner, *peers;
    struct job *jobs;
    dev_t proc_device;
    bool has_proc;
};
extern struct guest_init guest;

/* Serve until the owner disconnects or the time to live is over. */
void serve_guest(void);

/* Start the program of a SPAWN in a session of its own, on these descriptors; return its pid or -1. */
pid_t start_program(const struct request *r, int input, int output, int error, bool terminal);

/* Open the two ends of a new terminal, in this order. */
int open_terminal(int ends[2]);
/* Open the pipes of a job; `child_fds` gets the program's stdin, stdout and stderr, -1 where there is none to close. */
int open_pipes(struct job *job, int child_fds[3], bool wants_input);

/* File requests; 0, or -1 with `last_error`. */
int read_file(struct peer *peer, const struct request *r);
int write_file(struct peer *peer, const struct request *r);
int list_directory(struct peer *peer, const struct request *r);
int stat_path(struct peer *peer, const struct request *r);
int remove_path(struct peer *peer, const struct request *r);
int make_directory(struct peer *peer, const struct request *r);
int make_link(struct peer *peer, const struct request *r);

/* Open a regular file; refuse procfs files that expose this process. */
int open_regular(const char *path, int flags, mode_t mode);

/* Join `base/path`, or copy the path if it is absolute; false when it does not fit. */
bool join_path(const char *base, const char *path, char *into, size_t room);

/* Quote a text like Python's repr. */
const char *quote(const char *text);

void put_ok(struct peer *peer, uint32_t call);

#endif
