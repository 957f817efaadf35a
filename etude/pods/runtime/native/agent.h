/* What the parts of the agent share: agent.c has the loop and the jobs, spawn.c starts programs, files.c the file calls.
 *
 * One thread, no handlers, no locks. Whoever answers a request adds frames to the peer's queue; the loop sends them.
 */
#ifndef ETUDE_AGENT_H
#define ETUDE_AGENT_H

#include <limits.h>
#include <sys/types.h>

#include "wire.h"

/* One connection. */
struct peer {
    struct peer *next;
    int fd;
    struct buffer received, queue;
    bool stalled; /* its queue is so long that the output of its jobs is left in their pipes */
};

/* A command somebody started, and the descriptors that lead to it. */
struct job {
    struct job *next;
    struct peer *peer; /* NULL once nobody can hear it */
    uint32_t call;
    pid_t pid;
    int outputs[2]; /* standard output, standard error; -1 when closed */
    int64_t sent[2], limit;
    int input;
    bool input_ends;          /* close it when `pending` is empty */
    struct buffer pending;    /* input that the pipe has not taken */
    struct buffer unanswered; /* calls of INPUT that wait for it to be taken */
    int terminal;             /* the same descriptor as input and outputs[0], or -1 */
    bool left;                /* nobody has the terminal open at the moment */
    int flags;
    int64_t started, deadline; /* 0: none */
};

struct agent {
    int listener, epoll, signals, null;
    int carried[64], carried_count;
    char workdir[PATH_MAX];
    bool mark_children, running;
    int64_t deadline; /* 0: none */
    struct peer *owner, *peers;
    struct job *jobs;
    dev_t proc_device;
    bool has_proc;
};
extern struct agent agent;

/* Serve until the owner goes or the time to live is over. */
void serve_agent(void);

/* Start the program of a SPAWN in a session of its own, on these descriptors; its pid or -1. */
pid_t start_program(const struct request *r, int input, int output, int error, bool terminal);

/* The two ends of a new terminal. */
int open_terminal(int *master, int *slave);
/* Our ends go into the job, theirs into `theirs`: standard input, output, error, -1 where there is none to close. */
int open_pipes(struct job *job, int theirs[3], bool wants_input);

/* File calls; 0, or -1 with `trouble`. */
int read_file(struct peer *peer, const struct request *r);
int write_file(struct peer *peer, const struct request *r);
int list_directory(struct peer *peer, const struct request *r);
int stat_path(struct peer *peer, const struct request *r);
int remove_path(struct peer *peer, const struct request *r);
int make_directory(struct peer *peer, const struct request *r);
int make_link(struct peer *peer, const struct request *r);

/* Open a regular file that is not a window into this very process. */
int open_regular(const char *path, int flags, mode_t mode);

/* `base/path`, or the path itself when it is absolute; false when it does not fit. */
bool join_path(const char *base, const char *path, char *into, size_t room);

/* A text in quotes, as Python's repr would put it into a message. */
const char *quote(const char *text);

/* Processes beside this one that are not dead. */
int other_processes(void);

void put_ok(struct peer *peer, uint32_t call);

#endif
