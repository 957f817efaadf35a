/* Start a program for the guest init: its user, its arguments and environment, and exec.
 *
 * By vfork, because a fork copies page tables: the child shares our memory until it execs, touches nothing but
 * `struct start`, and leaves its error there. Everything that allocates or can be refused is done before.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "init.h"

enum { MAX_GROUPS = 256, MAX_TABLE = 1 << 22, MAX_UNIQUE_VARIABLES = 1024 };

#ifndef SYS_close_range
#define SYS_close_range 436
#endif

/* Everything that the child needs, prepared before the vfork. */
struct start {
    char **argv, **env;
    const char *search; /* PATH of its environment */
    char cwd[PATH_MAX];
    int input, output, error;
    bool terminal, as_user;
    uint32_t uid, gid, groups[MAX_GROUPS];
    size_t group_count;
    volatile int failed; /* errno, set by the child */
    volatile enum { IN_CHDIR, IN_IDENTITY, IN_TERMINAL, IN_EXEC } step;
};

/* ------------------------------------------------------------------------------------------- descriptors */

/* The slave comes from the master, so nothing in the pod's /dev can replace it. */
int open_terminal(int ends[2])
{
    int unlocked = 0;
    ends[0] = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (ends[0] < 0)
        return fail_errno("open a terminal");
    if (ioctl(ends[0], TIOCSPTLCK, &unlocked) ||
        (ends[1] = ioctl(ends[0], TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC)) < 0) {
        fail_errno("open a terminal");
        close(ends[0]);
        return -1;
    }
    return 0;
}

int open_pipes(struct job *job, int child_fds[3], bool wants_input)
{
    int ends[2];
    if (wants_input) {
        if (pipe2(ends, O_CLOEXEC))
            return fail(errno, "%s", error_text(errno));
        child_fds[0] = ends[0], job->input = ends[1];
    }
    for (int i = 0; i < 2; i++) {
        if (pipe2(ends, O_CLOEXEC))
            return fail(errno, "%s", error_text(errno));
        job->outputs[i] = ends[0], child_fds[1 + i] = ends[1];
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------- user */

/* Read a file of /etc as a string. The pod may have replaced it by a fifo or an endless file. */
static char *read_table(const char *path)
{
    char *text = malloc(MAX_TABLE);
    int fd = text ? open_regular(path, O_RDONLY, 0) : -1;
    size_t size = 0;
    ssize_t got = 1;
    while (fd >= 0 && size < MAX_TABLE - 1 && (got = read(fd, text + size, MAX_TABLE - 1 - size)) > 0)
        size += (size_t)got;
    if (text)
        text[size] = 0;
    if (fd >= 0)
        close(fd);
    return text;
}

/* Split the next line of a table into columns in place; return their number, -1 after the last line. */
static int next_row(char **at, char *columns[8])
{
    char *line = *at;
    int count = 1;
    if (!line || !*line)
        return -1;
    char *end = strchr(line, '\n');
    *at = end ? end + 1 : line + strlen(line);
    if (end)
        *end = 0;
    columns[0] = line;
    for (char *c = line; *c; c++)
        if (*c == ':') {
            *c = 0;
            if (count < 8)
                columns[count++] = c + 1;
        }
    return count;
}

/* Parse a decimal number that can be an id; -1 if it is none. */
static int64_t id_of(const char *text)
{
    int64_t value = 0;
    if (!*text)
        return -1;
    for (; *text; text++) {
        if (*text < '0' || *text > '9' || value > UINT32_MAX)
            return -1;
        value = value * 10 + (*text - '0');
    }
    return value < UINT32_MAX ? value : -1; /* the largest means "unchanged" to the kernel */
}

static bool is_member(const char *name, const char *list)
{
    size_t size = strlen(name);
    for (const char *at = list; at; at = strchr(at, ','), at = at ? at + 1 : NULL)
        if (!strncmp(at, name, size) && (at[size] == ',' || !at[size]))
            return true;
    return false;
}

/* Find the groups that list `name` as a member, and the id of `group` unless that is empty. */
static int find_groups(struct start *s, const char *name, const char *group, int64_t *gid)
{
    char *text = read_table("/etc/group"), *at = text, *row[8];
    bool found = false;
    int columns, failed = 0;
    if (*group)
        *gid = -1;
    while (!failed && (columns = next_row(&at, row)) >= 0) {
        if (columns >= 3 && *group && !found && (!strcmp(row[0], group) || !strcmp(row[2], group)))
            found = true, *gid = id_of(row[2]);
        if (columns < 4 || !is_member(name, row[3]))
            continue;
        int64_t id = id_of(row[2]);
        if (id < 0 || s->group_count == MAX_GROUPS)
            failed = fail(EINVAL, "ValueError: group %.64s is of no use", row[0]);
        else
            s->groups[s->group_count++] = (uint32_t)id;
    }
    free(text);
    if (*group && !found)
        *gid = id_of(group);
    return failed;
}

/* Find user, group and groups of `name`, `uid` or `uid:gid` in the pod's own /etc; no name services. */
static int find_user(struct start *s, const char *requested)
{
    char name[256], *group, *text, *at, *row[8];
    int columns;
    snprintf(name, sizeof name, "%s", requested);
    group = strchr(name, ':');
    if (group)
        *group++ = 0;
    int64_t uid = id_of(name), gid = uid;
    const char *called = name;
    at = text = read_table("/etc/passwd");
    while ((columns = next_row(&at, row)) >= 0)
        if (columns >= 4 && (!strcmp(row[0], name) || !strcmp(row[2], name))) {
            called = row[0], uid = id_of(row[2]), gid = id_of(row[3]);
            break;
        }
    int failed = find_groups(s, called, group ? group : "", &gid);
    free(text);
    if (!failed && (uid < 0 || gid < 0))
        failed = fail(EINVAL, "no user %s in the pod", quote(requested));
    s->as_user = true, s->uid = (uint32_t)uid, s->gid = (uint32_t)gid;
    return failed;
}

/* ------------------------------------------------------------------------------------ arguments, environment */

/* Return the index for a variable: that of an earlier one of the same name, which is not searched beyond a thousand. */
static size_t env_index(char **env, size_t count, const char *entry)
{
    size_t name = (size_t)(strchr(entry, '=') - entry) + 1;
    for (size_t i = 0; count <= MAX_UNIQUE_VARIABLES && i < count; i++)
        if (!strncmp(env[i], entry, name))
            return i;
    return count;
}

/* Copy argv and environment into one block of memory, which the caller frees; NULL with `last_error`. */
static void *parse_argv_env(struct start *s, const struct request *r)
{
    size_t args = 0, vars = 0, room = 0, at = 0;
    struct span value;
    int key;
    while (next_field(r, &at, &key, &value))
        if (key == ARG || key == ENV) {
            if (memchr(value.data, 0, value.size)) {
                fail(EINVAL, "ValueError: embedded null byte");
                return NULL;
            }
            args += key == ARG, vars += key == ENV, room += value.size + 1;
        }
    if (!args) {
        fail(EINVAL, "IndexError: no program is named");
        return NULL;
    }
    size_t pointers = (args + vars + 2) * sizeof(char *);
    char **block = malloc(pointers + room);
    if (!block) {
        fail(ENOMEM, "%s", error_text(ENOMEM));
        return NULL;
    }
    char *text = (char *)block + pointers;
    s->argv = block, s->env = block + args + 1;
    args = vars = at = 0;
    while (next_field(r, &at, &key, &value)) {
        if (key != ARG && (key != ENV || !memchr(value.data, '=', value.size)))
            continue;
        memcpy(text, value.data, value.size);
        text[value.size] = 0;
        if (key == ARG) {
            s->argv[args++] = text;
        } else {
            size_t index = env_index(s->env, vars, text);
            s->env[index] = text;
            vars += index == vars;
        }
        text += value.size + 1;
    }
    s->argv[args] = s->env[vars] = NULL;
    s->search = "/bin:/usr/bin";
    for (size_t i = 0; i < vars; i++)
        if (!strncmp(s->env[i], "PATH=", 5))
            s->search = s->env[i] + 5;
    return block;
}

static int find_workdir(struct start *s, const struct request *r)
{
    char requested[PATH_MAX];
    struct stat info;
    bool fits = text_of(field(r, CWD), requested, sizeof requested) &&
                join_path(guest.workdir, requested, s->cwd, sizeof s->cwd);
    if (!fits || stat(s->cwd, &info) || !S_ISDIR(info.st_mode))
        return fail(ENOTDIR, "the working directory %s is not there", fits ? s->cwd : "asked for");
    return 0;
}

/* ------------------------------------------------------------------------------------------------ child */

/* execve along PATH; return the first error other than "not found". */
static int exec_along_path(const struct start *s)
{
    char path[PATH_MAX];
    int first = 0;
    const char *name = s->argv[0];
    if (strchr(name, '/')) {
        execve(name, s->argv, s->env);
        return errno;
    }
    for (const char *at = s->search;; at++) {
        size_t size = strcspn(at, ":");
        if (size + strlen(name) + 2 > sizeof path) {
            errno = ENAMETOOLONG;
        } else {
            memcpy(path, at, size);
            path[size] = '/';
            strcpy(path + size + (size && at[size - 1] != '/'), name);
            execve(path, s->argv, s->env);
        }
        if (errno != ENOENT && errno != ENOTDIR && !first)
            first = errno;
        at += size;
        if (!*at)
            return first ? first : errno;
    }
}

/* Raw calls for the identity: the C library's would try to notify threads, in memory that is not the child's.
 * Where one id is mapped setgroups is denied, and there are no groups: the pod's own user needs no change. */
static int set_identity(const struct start *s)
{
    bool is_own = s->uid == geteuid() && s->gid == getegid();
    if (syscall(SYS_setgroups, s->group_count, s->groups) && !(is_own && errno == EPERM))
        return -1;
    return syscall(SYS_setresgid, s->gid, s->gid, s->gid) || syscall(SYS_setresuid, s->uid, s->uid, s->uid) ? -1 : 0;
}

/* In the child of a vfork: exec the program, or store the error and exit. */
__attribute__((noreturn, noinline)) static void exec_program(struct start *s)
{
    sigset_t none;
    dup2(s->input, 0);
    dup2(s->output, 1);
    dup2(s->error, 2);
    s->step = IN_CHDIR;
    if (chdir(s->cwd))
        goto failed;
    umask(022);
    setsid();
    syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, &guest.program_files, NULL);
    s->step = IN_IDENTITY;
    if (s->as_user && set_identity(s))
        goto failed;
    s->step = IN_TERMINAL;
    if (s->terminal && ioctl(0, TIOCSCTTY, 0))
        goto failed;
    s->step = IN_EXEC;
    syscall(SYS_close_range, 3, ~0U, 0);
    sigemptyset(&none); /* every handler is already the default; only the mask is ours */
    sigprocmask(SIG_SETMASK, &none, NULL);
    errno = exec_along_path(s);
failed:
    s->failed = errno ? errno : EIO;
    _exit(127);
}

__attribute__((noinline)) static pid_t vfork_program(struct start *s)
{
    pid_t pid = vfork();
    if (pid == 0)
        exec_program(s);
    return pid;
}

/* The OOM killer must choose a program, not the guest init. Children inherit the score.
 *
 * Set from here, not from the child: before exec it shares our memory, which is not dumpable, and the pod's root may
 * not open the file of such a process. */
static void adjust_oom_score(pid_t pid)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/oom_score_adj", (int)pid);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    if (write(fd, "1000", 4) < 0) {
        /* it has already ended */
    }
    close(fd);
}

static int report_start_error(const struct start *s)
{
    switch (s->step) {
    case IN_CHDIR: return fail(s->failed, "%s: %s", quote(s->cwd), error_text(s->failed));
    case IN_IDENTITY: return fail(s->failed, "become user %u: %s", s->uid, error_text(s->failed));
    case IN_TERMINAL: return fail(EINVAL, "take the terminal: %s", error_text(s->failed));
    default: break;
    }
    const char *name = s->argv[0];
    return fail(s->failed, "%s%s%s", *name ? quote(name) : "", *name ? ": " : "", error_text(s->failed));
}

pid_t start_program(const struct request *r, int input, int output, int error, bool terminal)
{
    struct start s = {.input = input, .output = output, .error = error, .terminal = terminal};
    char user[256];
    struct span requested = field(r, USER);
    if (!text_of(requested, user, sizeof user))
        return fail(EINVAL, "no such user in the pod");
    if ((requested.size && find_user(&s, user)) || find_workdir(&s, r))
        return -1;
    void *block = parse_argv_env(&s, r);
    if (!block)
        return -1;
    pid_t pid = vfork_program(&s);
    if (pid < 0)
        fail(errno, "%s", error_text(errno));
    else if (s.failed) {
        waitpid(pid, NULL, 0);
        pid = report_start_error(&s);
    } else if (guest.adjust_oom_score)
        adjust_oom_score(pid);
    free(block);
    return pid;
}
