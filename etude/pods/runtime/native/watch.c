/* The watcher of a pod whose files are on a disk without quotas: it measures them and kills the pod over its limits.
 *
 * The limit is soft: between two measurements the pod can write as much as the disk takes. Measured are the files of the
 * pod's directory, and deleted ones that its processes have open or mapped; not those in flight between its sockets. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>

#include "processes.h"
#include "zygote.h"

#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif

enum {
    MAX_DEPTH = 400,       /* of directories; each level takes a descriptor and a few hundred bytes of stack */
    MAX_PROCESSES = 65536,
    MIN_MS = 20,
    MAX_MS = 1000,
    PAUSE_SHARE = 4,       /* pause at least this many times as long as a measurement takes */
    WRITES_PER_MS = 2 << 20, /* bytes and files that a pod may write in a millisecond, for the pause before a limit */
    FILES_PER_MS = 200,
    OVERLAY = 0x794c7630,
};

/* A file that is counted once, however many links, descriptors and mappings it has. */
struct shared_file {
    uint64_t device, inode;
    int64_t bytes;
};

struct usage {
    int64_t bytes, files;
    struct buffer shared;
    const char *unknown; /* why not everything could be measured: then the pod is killed, too */
};

static void add_shared(struct usage *usage, uint64_t device, uint64_t inode, int64_t bytes)
{
    struct shared_file file = {device, inode, bytes};
    append(&usage->shared, &file, sizeof file);
}

/* ------------------------------------------------------------------------------------------------ directory */

static void measure_directory(struct usage *usage, int fd, int depth);

/* Measure a directory below another, also one that its owner, which is our user, has closed: it is open meanwhile. */
static void measure_below(struct usage *usage, int parent, const char *name, int depth)
{
    const int flags = O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    char path[40];
    struct stat info, now;
    int fd = openat(parent, name, O_RDONLY | flags), closed = -1;
    if (fd < 0 && errno == EACCES && (closed = openat(parent, name, O_PATH | flags)) >= 0 && !fstat(closed, &info)) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", closed); /* not by name, which can be another file by now */
        if (!chmod(path, (info.st_mode & 07777) | 0500))
            fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    }
    if (fd >= 0)
        measure_directory(usage, fd, depth);
    if (closed >= 0) {
        if (fd >= 0 && !fstat(closed, &now) && now.st_mode == (info.st_mode | 0500))
            chmod(path, info.st_mode & 07777);
        close(closed);
    }
}

static void measure_directory(struct usage *usage, int fd, int depth)
{
    struct stat info;
    DIR *directory = fdopendir(fd);
    if (!directory) {
        close(fd);
        return;
    }
    for (struct dirent *entry; (entry = readdir(directory));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..") ||
            fstatat(fd, entry->d_name, &info, AT_SYMLINK_NOFOLLOW))
            continue;
        usage->files++;
        if (!S_ISDIR(info.st_mode) && info.st_nlink > 1)
            add_shared(usage, info.st_dev, info.st_ino, (int64_t)info.st_blocks * 512);
        else
            usage->bytes += (int64_t)info.st_blocks * 512;
        if (!S_ISDIR(info.st_mode))
            continue;
        if (depth < MAX_DEPTH)
            measure_below(usage, fd, entry->d_name, depth + 1);
        else
            usage->unknown = "its directories are nested too deep to watch its disk limit";
    }
    closedir(directory);
}

/* ------------------------------------------------------------------------------------------------ processes */

/* Whether a file of a process is on the pod's disk: on its overlay, or in its directory. */
static bool on_disk(const char *path, const struct stat *info, dev_t device)
{
    struct statfs system;
    return info->st_dev == device || (!statfs(path, &system) && (uint32_t)system.f_type == OVERLAY);
}

/* Count the deleted files that a process has open. */
static void measure_descriptors(struct usage *usage, pid_t pid, dev_t device)
{
    char path[64];
    struct stat info;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *directory = opendir(path);
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        snprintf(path, sizeof path, "/proc/%d/fd/%.20s", (int)pid, entry->d_name);
        if (!stat(path, &info) && S_ISREG(info.st_mode) && !info.st_nlink && on_disk(path, &info, device))
            add_shared(usage, info.st_dev, info.st_ino, (int64_t)info.st_blocks * 512);
    }
    if (directory)
        closedir(directory);
}

/* Count the deleted files that a process has mapped to write to, which need not be open: with the whole mapping. */
static void measure_mappings(struct usage *usage, pid_t pid)
{
    char path[PATH_MAX + 256], access[8];
    unsigned long first, end, inode;
    unsigned major, minor;
    int name;
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *file = fopen(path, "re");
    while (file && fgets(path, sizeof path, file)) {
        size_t size = strlen(path);
        if (size < 12 || strcmp(path + size - 11, " (deleted)\n") != 0 ||
            sscanf(path, "%lx-%lx %7s %*x %x:%x %lu %n", &first, &end, access, &major, &minor, &inode, &name) != 6)
            continue;
        bool memory = !strncmp(path + name, "/dev/", 5) || !strncmp(path + name, "/memfd:", 7) ||
                      !strncmp(path + name, "/SYSV", 5); /* of tmpfs, and charged to memory */
        if (access[3] == 's' && !memory)
            add_shared(usage, (uint64_t)major << 32 | minor, inode, (int64_t)(end - first));
    }
    if (file)
        fclose(file);
}

/* Append the children of a process, of all its threads, to a list of pids. */
static void list_children(struct buffer *list, pid_t pid)
{
    char path[80];
    int child;
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *directory = opendir(path);
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        snprintf(path, sizeof path, "/proc/%d/task/%.20s/children", (int)pid, entry->d_name);
        FILE *file = entry->d_name[0] == '.' ? NULL : fopen(path, "re");
        while (file && fscanf(file, "%d", &child) == 1)
            append(list, &child, sizeof child);
        if (file)
            fclose(file);
    }
    if (directory)
        closedir(directory);
}

static void measure_processes(struct usage *usage, pid_t pod, dev_t device)
{
    struct buffer pids = {0};
    list_children(&pids, pod);
    for (size_t at = 0; at < pids.size / sizeof(int) && at < MAX_PROCESSES; at++) {
        int pid = ((int *)bytes(&pids))[at];
        measure_descriptors(usage, pid, device);
        measure_mappings(usage, pid);
        list_children(&pids, pid);
    }
    clear_buffer(&pids);
}

/* ------------------------------------------------------------------------------------------------- watching */

static int by_file(const void *one, const void *other)
{
    const struct shared_file *a = one, *b = other;
    int order = a->device < b->device ? -1 : a->device > b->device;
    if (!order)
        order = a->inode < b->inode ? -1 : a->inode > b->inode;
    return order ? order : a->bytes > b->bytes ? -1 : a->bytes < b->bytes; /* the largest of equal files first */
}

static struct usage measure(int directory, pid_t pod)
{
    struct usage usage = {0};
    struct stat info;
    int fd = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info)) {
        usage.unknown = "its directory cannot be read to watch its disk limit";
        return usage;
    }
    measure_directory(&usage, fd, 0);
    measure_processes(&usage, pod, info.st_dev);
    struct shared_file *files = (struct shared_file *)bytes(&usage.shared);
    size_t count = usage.shared.size / sizeof *files;
    if (count)
        qsort(files, count, sizeof *files, by_file);
    for (size_t i = 0; i < count; i++)
        if (!i || files[i].device != files[i - 1].device || files[i].inode != files[i - 1].inode)
            usage.bytes += files[i].bytes;
    clear_buffer(&usage.shared);
    return usage;
}

/* Leave the reason where the host finds it, in the pod's directory of the state directory. */
static void report(const char *name, const struct usage *usage, int64_t size, int64_t inodes)
{
    char path[NAME + 32], text[200];
    snprintf(path, sizeof path, "pods/%s/over-limit", name);
    int length = snprintf(text, sizeof text, "%s", usage->unknown ? usage->unknown : "");
    if (!usage->unknown)
        length = snprintf(text, sizeof text, "it wrote %lld bytes in %lld files; its limits are %lld and %lld",
                          (long long)usage->bytes, (long long)usage->files, (long long)size, (long long)inodes);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, text, (size_t)length) != length)
        fprintf(stderr, "zygote: pod %s: %s\n", name, text);
    close(fd);
}

static int pause_ms(const struct usage *usage, int64_t size, int64_t inodes, int64_t taken_ns)
{
    int64_t pause = (size - usage->bytes) / WRITES_PER_MS, files = (inodes - usage->files) / FILES_PER_MS;
    int64_t least = taken_ns / 1000000 * PAUSE_SHARE;
    pause = files < pause ? files : pause;
    least = least < MIN_MS ? MIN_MS : least;
    pause = pause > MAX_MS ? MAX_MS : pause;
    return (int)(pause < least ? least : pause);
}

void run_watcher(const struct request *spec, const struct pod *pod, int pidfd, pid_t parent)
{
    char path[PATH_MAX];
    int64_t size = number(spec, ZYGOTE_SIZE, INT64_MAX), inodes = number(spec, ZYGOTE_INODES, INT64_MAX);
    bool fits = text_of(field(spec, ZYGOTE_WATCH), path, sizeof path);
    int directory = fits ? open(path, O_PATH | O_DIRECTORY | O_CLOEXEC) : -1, kept[2] = {pidfd, directory};
    struct pollfd life = {.fd = pidfd, .events = POLLIN};
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (getppid() != parent)
        _exit(1);
    close_others(kept, 2);
    for (int pause = 0; poll(&life, 1, pause) <= 0;) {
        int64_t started = now_ns();
        struct usage usage = measure(directory, pod->pid);
        if (usage.bytes > size || usage.files > inodes || usage.unknown) {
            report(pod->name, &usage, size, inodes);
            syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, NULL, 0);
            break;
        }
        pause = pause_ms(&usage, size, inodes, now_ns() - started);
    }
    _exit(0);
}
