/* Descendants of a process, and descriptors passed between processes. */
#ifndef ETUDE_PROCESSES_H
#define ETUDE_PROCESSES_H

#include <sys/types.h>

#include "protocol.h"

enum { MAX_FDS = 64 /* descriptors of one message */ };

/* Count the live descendants of `root` and send each a signal unless that is 0; those in `kept` and theirs are left. */
int visit_descendants(pid_t root, const pid_t *kept, size_t kept_count, int signal_number);
/* Kill the descendants of `root`, except `kept` and theirs; return how many are left, normally 0. */
int kill_descendants(pid_t root, const pid_t *kept, size_t kept_count);

/* Close every descriptor but `kept` and the standard three. */
void close_others(int *kept, int count);
/* Send data with descriptors, as send(2). */
ssize_t send_fds(int socket, const void *data, size_t size, const int *fds, int count);
/* Receive data, as recv(2), and append its descriptors to `fds`; those for which there is no room are closed. */
ssize_t receive_fds(int socket, void *data, size_t size, int *fds, int *count, int room, int flags);

#endif
