/* Start as the zygote of a state directory, or as the guest init of a pod without isolation. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "init.h"
#include "processes.h"
#include "zygote.h"

enum { MAX_FILES = 65536 /* that a program of a pod can have open */, SECURE_NO_SETUID_FIXUP = 4 };

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
            serve_zygote();
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
    guest.listener = zygote.listener, guest.channel = -1, guest.program_files = zygote.setup.files;
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
        /* Each pod needs a descriptor, and a thousand exceed the usual limit. Programs get less than a guest init:
         * the kernel refuses to send descriptors while a user has more in flight than the sender may open. */
        files = zygote.setup.files;
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
        struct rlimit *programs = &zygote.setup.files;
        programs->rlim_max = files.rlim_max / 2 < MAX_FILES ? files.rlim_max / 2 : MAX_FILES;
        programs->rlim_cur = programs->rlim_cur < programs->rlim_max ? programs->rlim_cur : programs->rlim_max;
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
    /* By system call: the C library keeps two signals to itself, and what posix_spawn starts has those ignored. */
    static const unsigned long standard[8]; /* the kernel's struct sigaction: all zero is SIG_DFL */
    for (int number = 1; number <= 64; number++)
        syscall(SYS_rt_sigaction, number, standard, NULL, 8);
    if (zygote.namespaces || processes)
        umask(077);
    /* Without it a change of the user would drop our capabilities. */
    zygote.keeps_capabilities = !getuid() && !prctl(PR_SET_SECUREBITS, SECURE_NO_SETUID_FIXUP, 0, 0, 0);
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
        serve_zygote();
    else if (!failed)
        failed = processes ? guard_worker() : serve_unisolated(directory);
    if (failed)
        fprintf(stderr, "zygote: %s\n", last_error.text);
    return failed ? 1 : 0;
}
