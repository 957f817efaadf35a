/* The guest init's file requests. The files belong to hostile programs, which may change them at any moment.
 *
 * Nothing is opened that could block or that is reached through procfs magic links; only regular files are read and
 * written, and none that expose this process. Trees are removed by descriptor, so no link is ever followed.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "init.h"

#ifndef SYS_openat2
#define SYS_openat2 437
#endif
static const uint64_t NO_MAGIC_LINKS = 2;
enum { MAX_ENTRIES = 20000 /* of a listing: the client holds them all */ };

/* ------------------------------------------------------------------------------------------------- paths */

const char *quote(const char *text)
{
    static char quoted[320];
    size_t at = 0;
    char mark = strchr(text, '\'') && !strchr(text, '"') ? '"' : '\'';
    quoted[at++] = mark;
    for (const unsigned char *c = (const unsigned char *)text; *c && at < sizeof quoted - 8; c++)
        if (*c == '\\' || *c == (unsigned char)mark)
            at += (size_t)sprintf(quoted + at, "\\%c", *c);
        else if (*c == '\n' || *c == '\t' || *c == '\r')
            at += (size_t)sprintf(quoted + at, "\\%c", *c == '\n' ? 'n' : *c == '\t' ? 't' : 'r');
        else if (*c < 0x20 || *c == 0x7f)
            at += (size_t)sprintf(quoted + at, "\\x%02x", *c);
        else
            quoted[at++] = (char)*c;
    quoted[at++] = mark;
    quoted[at] = 0;
    return quoted;
}

static int fail_path(const char *path)
{
    int number = errno;
    return fail(number, "%s: %s", quote(path), error_text(number));
}

bool join_path(const char *base, const char *path, char *into, size_t room)
{
    size_t size = strlen(base);
    const char *between = *path == '/' || !size || base[size - 1] == '/' ? "" : "/";
    return (size_t)snprintf(into, room, "%s%s%s", *path == '/' ? "" : base, between, path) < room;
}

/* Get the PATH of a request, relative to the working directory. */
static int path_of(const struct request *r, char path[PATH_MAX])
{
    char requested[PATH_MAX];
    struct span value = field(r, PATH);
    if (!value.size || memchr(value.data, 0, value.size))
        return fail(ENOENT, "an empty path");
    if (!text_of(value, requested, sizeof requested) || !join_path(guest.workdir, requested, path, PATH_MAX))
        return fail(ENAMETOOLONG, "%s", error_text(ENAMETOOLONG));
    return 0;
}

/* Get the parent directory of a path, as os.path.dirname. */
static void parent_of(const char *path, char parent[PATH_MAX])
{
    size_t size = strlen(path);
    while (size && path[size - 1] != '/')
        size--;
    while (size > 1 && path[size - 1] == '/')
        size--;
    memcpy(parent, path, size);
    parent[size] = 0;
}

/* Create a directory and its parents; an existing one is fine. */
static int make_directories(const char *path)
{
    char part[PATH_MAX];
    struct stat info;
    size_t size = strlen(path);
    int number = 0;
    for (size_t at = 1; at <= size && (!number || number == EEXIST); at++) {
        if (at < size && path[at] != '/')
            continue;
        memcpy(part, path, at);
        part[at] = 0;
        number = mkdir(part, 0777) ? errno : 0;
    }
    if (!number || (stat(path, &info) == 0 && S_ISDIR(info.st_mode)))
        return 0;
    errno = number;
    return fail_path(part);
}

int open_regular(const char *path, int flags, mode_t mode)
{
    /* O_NONBLOCK: do not block on the other end of a fifo. */
    uint64_t how[3] = {(uint64_t)(flags | O_NONBLOCK | O_CLOEXEC | O_NOCTTY), flags & O_CREAT ? mode : 0,
                       NO_MAGIC_LINKS};
    char link[64], real[64] = "";
    struct stat info;
    int fd = (int)syscall(SYS_openat2, AT_FDCWD, path, how, sizeof how);
    if (fd < 0)
        return fail_path(path);
    if (fstat(fd, &info)) {
        fail_path(path);
    } else if (S_ISDIR(info.st_mode)) {
        errno = EISDIR;
        fail_path(path);
    } else if (!S_ISREG(info.st_mode)) {
        fail(EINVAL, "%s: not a regular file", quote(path));
    } else {
        if (!guest.has_proc || info.st_dev != guest.proc_device)
            return fd;
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t size = readlink(link, real, sizeof real - 1); /* its beginning is enough */
        real[size < 0 ? 0 : size] = 0;
        snprintf(link, sizeof link, "/proc/%d/", (int)getpid());
        if (size > 0 && !(flags & (O_WRONLY | O_RDWR)) && strncmp(real, link, strlen(link)) != 0)
            return fd;
        errno = EACCES;
        fail_path(path);
    }
    close(fd);
    return -1;
}

/* ---------------------------------------------------------------------------------------- reading, writing */

int read_file(struct peer *peer, const struct request *r)
{
    char path[PATH_MAX];
    int64_t left = number(r, LIMIT, CHUNK), at = number(r, OFFSET, 0);
    struct buffer *queue = &peer->queue;
    struct stat info;
    if (path_of(r, path))
        return -1;
    int fd = open_regular(path, O_RDONLY, 0);
    if (fd < 0)
        return -1;
    left = left < 4 * CHUNK ? left : 4 * CHUNK;
    while (left > 0) {
        size_t want = left < CHUNK ? (size_t)left : CHUNK, before = queue->size;
        size_t mark = begin_frame(queue, OUT, r->call);
        put_head(queue, DATA, 0);
        uint8_t *room = reserve(queue, want);
        ssize_t size = room ? pread(fd, room, want, at) : 0;
        if (size <= 0) {
            int number = errno;
            queue->size = before;
            if (size == 0)
                break;
            close(fd);
            return fail(number, "%s", error_text(number));
        }
        uint32_t length = (uint32_t)size;
        memcpy(room - 4, &length, 4);
        queue->size += (size_t)size;
        end_frame(queue, mark);
        at += size, left -= size;
    }
    fstat(fd, &info);
    close(fd);
    size_t mark = begin_frame(queue, OK, r->call);
    put_number(queue, SIZE, info.st_size);
    end_frame(queue, mark);
    return 0;
}

static int write_all(int fd, struct span data, int64_t at, bool at_end)
{
    while (data.size) {
        ssize_t size = at_end ? write(fd, data.data, data.size) : pwrite(fd, data.data, data.size, at);
        if (size < 0 && errno == EINTR)
            continue;
        if (size < 0)
            return fail(errno, "%s", error_text(errno));
        data.data += size, data.size -= (uint32_t)size, at += size;
    }
    return 0;
}

int write_file(struct peer *peer, const struct request *r)
{
    char path[PATH_MAX], parent[PATH_MAX];
    int64_t how = number(r, FLAGS, 0), mode = number(r, MODE, -1);
    int flags = O_WRONLY | O_CREAT | (how & APPEND ? O_APPEND : 0), failed = 0;
    if (path_of(r, path))
        return -1;
    int fd = open_regular(path, flags, 0644);
    if (fd < 0 && last_error.number == ENOENT) {
        parent_of(path, parent);
        if (make_directories(parent))
            return -1;
        fd = open_regular(path, flags, 0644);
    }
    if (fd < 0)
        return -1;
    if (how & TRUNCATE && ftruncate(fd, 0))
        failed = fail(errno, "%s", error_text(errno));
    if (!failed)
        failed = write_all(fd, field(r, DATA), number(r, OFFSET, 0), how & APPEND);
    if (!failed && mode >= 0 && fchmod(fd, (mode_t)mode & 07777))
        failed = fail(errno, "%s", error_text(errno));
    close(fd);
    if (!failed)
        put_ok(peer, r->call);
    return failed;
}

/* --------------------------------------------------------------------------------------------- describing */

static int describe(struct peer *peer, uint32_t call, int directory, const char *path, const char *name)
{
    struct buffer *queue = &peer->queue;
    struct stat info;
    char target[PATH_MAX];
    ssize_t size = 0;
    if (fstatat(directory, path, &info, AT_SYMLINK_NOFOLLOW))
        return fail_path(path);
    const char *kind = S_ISREG(info.st_mode) ? "f" : S_ISDIR(info.st_mode) ? "d" : S_ISLNK(info.st_mode) ? "l" : "o";
    if (S_ISLNK(info.st_mode) && (size = readlinkat(directory, path, target, sizeof target)) < 0)
        return fail_path(path);
    size_t mark = begin_frame(queue, ENTRY, call);
    put_text(queue, PATH, name);
    put_text(queue, KIND, kind);
    put_number(queue, SIZE, info.st_size);
    put_number(queue, MODE, info.st_mode & 07777);
    put_number(queue, MTIME, (int64_t)info.st_mtim.tv_sec * 1000000000 + info.st_mtim.tv_nsec);
    put_bytes(queue, TARGET, target, (size_t)size);
    end_frame(queue, mark);
    return 0;
}

static int by_name(const void *one, const void *other)
{
    return strcmp(*(char *const *)one, *(char *const *)other);
}

/* Return the names in a directory, sorted, in one block that the caller frees; NULL with `last_error`. */
static char **list_names(DIR *directory, size_t limit, size_t *count)
{
    struct buffer text = {0};
    size_t found = 0;
    for (struct dirent *entry; found <= limit && (entry = readdir(directory));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            append(&text, entry->d_name, strlen(entry->d_name) + 1);
            found++;
        }
    bool many = found > limit;
    char **names = text.failed || many ? NULL : malloc(found * sizeof *names + text.size + 1);
    if (many) {
        fail(EFBIG, "more than %zu files in one directory, the limit of a listing", limit);
    } else if (names) {
        char *at = (char *)(names + found);
        if (text.size)
            memcpy(at, text.data, text.size);
        for (size_t i = 0; i < found; i++, at += strlen(at) + 1)
            names[i] = at;
        qsort(names, found, sizeof *names, by_name);
    } else {
        fail(ENOMEM, "%s", error_text(ENOMEM));
    }
    clear_buffer(&text);
    *count = found;
    return names;
}

int list_directory(struct peer *peer, const struct request *r)
{
    char path[PATH_MAX];
    size_t count;
    int failed = 0;
    if (path_of(r, path))
        return -1;
    DIR *directory = opendir(path);
    if (!directory)
        return fail_path(path);
    char **names = list_names(directory, MAX_ENTRIES, &count);
    for (size_t i = 0; names && !failed && i < count; i++) {
        failed = describe(peer, r->call, dirfd(directory), names[i], names[i]);
        if (failed && last_error.number == ENOENT)
            failed = 0; /* removed meanwhile */
    }
    failed = failed || !names ? -1 : 0;
    free(names);
    closedir(directory);
    if (!failed)
        put_ok(peer, r->call);
    return failed;
}

int stat_path(struct peer *peer, const struct request *r)
{
    char path[PATH_MAX], bare[PATH_MAX];
    if (path_of(r, path))
        return -1;
    size_t size = strlen(path);
    while (size && path[size - 1] == '/')
        size--;
    memcpy(bare, path, size);
    bare[size] = 0;
    const char *slash = strrchr(bare, '/');
    const char *name = slash ? slash + 1 : bare;
    if (describe(peer, r->call, AT_FDCWD, path, *name ? name : "/"))
        return -1;
    put_ok(peer, r->call);
    return 0;
}

/* --------------------------------------------------------------------------------------- making, removing */

/* A directory on the current path: its identity and the subdirectories left to remove; the last one is entered. */
struct level {
    struct level *above;
    dev_t device;
    ino_t file;
    char **names;
    size_t left;
};

/* Open a directory with the rights to remove its entries, whatever its mode. */
static int open_for_removal(int parent, const char *name)
{
    const int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(parent, name, flags);
    if (fd < 0 && errno == EACCES && !fchmodat(parent, name, 0700, 0)) /* a link put here can only lead into the pod */
        fd = openat(parent, name, flags);
    if (fd < 0)
        return fail_path(name);
    fchmod(fd, 0700); /* an ordinary user may lack the rights needed next */
    return fd;
}

/* Unlink the files of a directory and keep the names of its subdirectories. */
static int unlink_files(int fd, struct level *level)
{
    struct stat info;
    size_t count;
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    DIR *directory = copy < 0 ? NULL : fdopendir(copy);
    if (!directory || fstat(fd, &info)) {
        fail_path("a directory");
        if (directory)
            closedir(directory);
        else if (copy >= 0)
            close(copy);
        return -1;
    }
    level->device = info.st_dev, level->file = info.st_ino, level->left = 0;
    level->names = list_names(directory, SIZE_MAX - 1, &count);
    closedir(directory);
    for (size_t i = 0; level->names && i < count; i++) {
        char *name = level->names[i];
        if (!unlinkat(fd, name, 0) || errno == ENOENT)
            continue;
        int number = errno;
        bool is_directory = fstatat(fd, name, &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(info.st_mode);
        errno = number;
        if (!is_directory)
            return fail_path(name);
        level->names[level->left++] = name;
    }
    return level->names ? 0 : -1;
}

/* Enter the next directory of a level (descend) or leave an empty one (ascend); return the new directory, or -1. */
static int descend(int here, struct level **at)
{
    struct level *level = calloc(1, sizeof *level);
    int below = level ? open_for_removal(here, (*at)->names[(*at)->left - 1]) : fail(ENOMEM, "%s", error_text(ENOMEM));
    close(here);
    if (below < 0) {
        free(level);
        return -1;
    }
    level->above = *at;
    *at = level;
    if (!unlink_files(below, level))
        return below;
    close(below);
    return -1;
}

static int ascend(int here, struct level **at)
{
    struct level *done = *at, *level = done->above;
    struct stat info;
    *at = level;
    free(done->names);
    free(done);
    int above = openat(here, "..", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    close(here);
    if (above < 0)
        return fail_path("..");
    const char *name = level->names[--level->left];
    if (fstat(above, &info) || info.st_dev != level->device || info.st_ino != level->file)
        fail(EBUSY, "%s: it is being moved", quote(name));
    else if (unlinkat(above, name, AT_REMOVEDIR))
        fail_path(name);
    else
        return above;
    close(above);
    return -1;
}

/* Remove a directory's contents: at any depth, following no link, and ending even if programs create more files. */
static int remove_contents(const char *path)
{
    struct level *at = calloc(1, sizeof *at);
    if (!at)
        return fail(ENOMEM, "%s", error_text(ENOMEM));
    int here = open_for_removal(AT_FDCWD, path);
    if (here >= 0 && unlink_files(here, at)) {
        close(here);
        here = -1;
    }
    while (here >= 0 && (at->left || at->above))
        here = at->left ? descend(here, &at) : ascend(here, &at);
    while (at) {
        struct level *above = at->above;
        free(at->names);
        free(at);
        at = above;
    }
    if (here < 0)
        return -1;
    close(here);
    return 0;
}

int remove_path(struct peer *peer, const struct request *r)
{
    char path[PATH_MAX];
    struct stat info;
    if (path_of(r, path))
        return -1;
    for (size_t size = strlen(path); size > 1 && path[size - 1] == '/'; size--)
        path[size - 1] = 0; /* remove a link to a directory as a link */
    if (lstat(path, &info))
        return fail_path(path);
    if (S_ISDIR(info.st_mode) && remove_contents(path))
        return -1;
    if (S_ISDIR(info.st_mode) ? rmdir(path) : unlink(path))
        return fail_path(path);
    put_ok(peer, r->call);
    return 0;
}

int make_directory(struct peer *peer, const struct request *r)
{
    char path[PATH_MAX];
    int64_t mode = number(r, MODE, -1);
    if (path_of(r, path) || make_directories(path))
        return -1;
    if (mode >= 0 && chmod(path, (mode_t)mode & 07777))
        return fail_path(path);
    put_ok(peer, r->call);
    return 0;
}

int make_link(struct peer *peer, const struct request *r)
{
    char path[PATH_MAX], parent[PATH_MAX], target[PATH_MAX];
    struct span data = field(r, DATA);
    if (path_of(r, path))
        return -1;
    parent_of(path, parent);
    if (make_directories(parent))
        return -1;
    if (data.size && memchr(data.data, 0, data.size))
        return fail(EINVAL, "ValueError: embedded null byte");
    if (!text_of(data, target, sizeof target))
        return fail(ENAMETOOLONG, "%s", error_text(ENAMETOOLONG));
    if (symlink(target, path))
        return fail_path(path);
    put_ok(peer, r->call);
    return 0;
}
