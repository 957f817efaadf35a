/* Descendants of a process, from procfs, and descriptors passed between processes. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "processes.h"

#ifndef SYS_close_range
#define SYS_close_range 436
#endif

enum { KILL_MS = 5000 /* for killed processes to end */ };

struct process {
    pid_t pid, parent;
    bool dead, found;
};

/* ------------------------------------------------------------------------------------------- descendants */

/* Read parent and state of a process; false when it is gone. */
static bool read_process(const char *name, struct process *process)
{
    char path[64], text[512], state;
    int parent;
    snprintf(path, sizeof path, "/proc/%.20s/stat", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    text[size < 0 ? 0 : size] = 0;
    const char *end = strrchr(text, ')'); /* a name may contain anything: the state follows the last bracket */
    if (!end || sscanf(end + 1, " %c %d", &state, &parent) != 2)
        return false;
    *process = (struct process){.pid = atoi(name), .parent = parent, .dead = state == 'Z' || state == 'X'};
    return true;
}

static int by_pid(const void *one, const void *other)
{
    return ((const struct process *)one)->pid - ((const struct process *)other)->pid;
}

static bool is_kept(pid_t pid, const pid_t *kept, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (kept[i] == pid)
            return true;
    return false;
}

/* Read the table of all processes into `table`, sorted by pid. */
static int read_processes(struct buffer *table)
{
    struct process process;
    DIR *directory = opendir("/proc");
    if (!directory)
        return fail_errno("list the processes");
    for (struct dirent *entry; (entry = readdir(directory));)
        if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && read_process(entry->d_name, &process))
            append(table, &process, sizeof process);
    closedir(directory);
    if (table->failed)
        return fail(ENOMEM, "%s", error_text(ENOMEM));
    if (table->size)
        qsort(table->data, table->size / sizeof process, sizeof process, by_pid);
    return 0;
}

int visit_descendants(pid_t root, const pid_t *kept, size_t kept_count, int signal_number)
{
    struct buffer table = {0};
    int count = read_processes(&table) ? -1 : 0;
    struct process *all = (struct process *)table.data, *end = all + table.size / sizeof *all;
    for (bool more = count == 0; more;) { /* until a pass finds no further one: a parent may have the higher pid */
        more = false;
        for (struct process *p = all; p < end; p++) {
            if (p->found || p->pid == root || is_kept(p->pid, kept, kept_count))
                continue;
            struct process wanted = {.pid = p->parent};
            const struct process *parent = bsearch(&wanted, all, (size_t)(end - all), sizeof *all, by_pid);
            if (p->parent != root && !(parent && parent->found))
                continue;
            p->found = more = true;
            if (p->dead)
                continue;
            count++;
            if (signal_number)
                kill(p->pid, signal_number);
        }
    }
    clear_buffer(&table);
    return count;
}

int kill_descendants(pid_t root, const pid_t *kept, size_t kept_count)
{
    int64_t deadline = after_ms(now_ns(), KILL_MS);
    int left;
    do { /* one pass can miss a concurrent fork */
        if (root == 1 && getpid() == 1)
            kill(-1, SIGKILL); /* every process of the pod but us, at once */
        left = visit_descendants(root, kept, kept_count, SIGKILL);
        sched_yield();
    } while (left > 0 && now_ns() < deadline);
    return left;
}

/* ------------------------------------------------------------------------------------------- descriptors */

static int by_number(const void *one, const void *other)
{
    return *(const int *)one - *(const int *)other;
}

void close_others(int *kept, int count)
{
    unsigned first = 3;
    qsort(kept, (size_t)count, sizeof *kept, by_number);
    for (int i = 0; i < count; i++) {
        if (kept[i] < 3)
            continue;
        if ((unsigned)kept[i] > first)
            syscall(SYS_close_range, first, kept[i] - 1, 0);
        first = (unsigned)kept[i] + 1;
    }
    syscall(SYS_close_range, first, ~0U, 0);
}

union control {
    struct cmsghdr head;
    char room[CMSG_SPACE(MAX_FDS * sizeof(int))];
};

ssize_t send_fds(int socket, const void *data, size_t size, const int *fds, int count)
{
    union control control = {0};
    struct iovec content = {(void *)data, size};
    struct msghdr message = {.msg_iov = &content, .msg_iovlen = 1};
    if (count) {
        message.msg_control = &control, message.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET, head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
        memcpy(CMSG_DATA(head), fds, (size_t)count * sizeof(int));
    }
    return sendmsg(socket, &message, MSG_NOSIGNAL);
}

ssize_t receive_fds(int socket, void *data, size_t size, int *fds, int *count, int room, int flags)
{
    union control control;
    struct iovec content = {data, size};
    struct msghdr message = {
        .msg_iov = &content, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control.room};
    ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | flags);
    if (got < 0)
        return got;
    for (struct cmsghdr *head = CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head)) {
        if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t i = 0; i < (head->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(head) + i * sizeof fd, sizeof fd);
            if (*count < room)
                fds[(*count)++] = fd;
            else
                close(fd);
        }
    }
    return got;
}
