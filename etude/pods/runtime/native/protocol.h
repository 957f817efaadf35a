/* The frames of guest/protocol.py and the requests of zygote_protocol.py: constants, buffers, checked parsing.
 *
 *     frame   u32 length of the rest | u8 op | u32 call | fields...        field   u8 key | u32 length | bytes
 *
 * Python is the specification. No length is trusted: a whole request is checked, numbers included, before any field is
 * read. A buffer that could not grow sets `failed` and accepts nothing more.
 * Integers are little-endian, as are the machines this is built for.
 */
#ifndef ETUDE_PROTOCOL_H
#define ETUDE_PROTOCOL_H

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the protocol is little-endian, and numbers are copied as they are in memory"
#endif

enum { PROTOCOL_VERSION = 1, CHUNK = 1 << 18, MAX_FRAME = 1 << 21, HEAD = 9, FIELD_HEAD = 5 };

/* requests to the guest init, replies, requests to the zygote */
enum {
    PING = 1, SPAWN, INPUT, SIGNAL, RESIZE, READ, WRITE, LIST, STAT, REMOVE, MKDIR, SYMLINK, OWN, PROCESSES, KILLALL
};
enum { HELLO = 64, OK, FAIL, STARTED, OUT, ERR, EXITED, ENTRY };
enum { CREATE = 32, KILL, SEAL, FETCH, DROP, STATUS = 38, STOP };

/* fields of the guest init's frames */
enum {
    ARG = 1, ENV, CWD, USER, DATA, FLAGS, ROWS, COLS, LIMIT, TIME, JOB, NUMBER, PATH, OFFSET, MODE, SIZE,
    KIND, MTIME, TARGET, PID, CODE, UTIME, STIME, MAXRSS
};

/* fields of the zygote's frames */
enum {
    ZYGOTE_ID = 128, ZYGOTE_LOWER, ZYGOTE_UPPER, ZYGOTE_SIZE, ZYGOTE_INODES, ZYGOTE_BIND, ZYGOTE_MAPPED,
    ZYGOTE_IDS, ZYGOTE_OWNER, ZYGOTE_CGROUP, ZYGOTE_HOSTNAME, ZYGOTE_WORKDIR, ZYGOTE_CAPS, ZYGOTE_FILTER,
    ZYGOTE_ADDRESS, ZYGOTE_LISTEN, ZYGOTE_FLAGS, ZYGOTE_SHM, ZYGOTE_LAYER, ZYGOTE_PIDS, ZYGOTE_PID, ZYGOTE_GROUP,
    ZYGOTE_RULESET, ZYGOTE_RULE, ZYGOTE_NOTIFY, ZYGOTE_PORT, ZYGOTE_WATCH
};

enum { KEEP_STDIN = 1, TIMED_OUT = 1, TRUNCATED = 2, END = 1, TRUNCATE = 1, APPEND = 2, ATTACHED = 1 };
enum { ADJUST_OOM_SCORE = 1, ZYGOTE_OPENS_TERMINALS = 2, OWN_IDS = 4, DISK_IMAGE = 8 };

/* ------------------------------------------------------------------------------------------------ errors */

/* The last error, until it is put into a FAIL frame. Functions that can fail set it and return -1. */
struct error {
    int number;
    char text[768];
};
extern struct error last_error;

/* Error texts of glibc, so that a message does not depend on the libc this was built with. */
static inline const char *error_text(int number)
{
    switch (number) {
    case ELOOP: return "Too many levels of symbolic links";
    case ENAMETOOLONG: return "File name too long";
    case EMFILE: return "Too many open files";
    case ENOMEM: return "Cannot allocate memory";
    case EDQUOT: return "Disk quota exceeded";
    case ENOTTY: return "Inappropriate ioctl for device";
    case EXDEV: return "Invalid cross-device link";
    case EBUSY: return "Device or resource busy";
    case EOVERFLOW: return "Value too large for defined data type";
    case EOPNOTSUPP: return "Operation not supported";
    default: return strerror(number);
    }
}

__attribute__((format(printf, 2, 3))) static inline int fail(int number, const char *format, ...)
{
    va_list rest;
    last_error.number = number ? number : EIO;
    va_start(rest, format);
    vsnprintf(last_error.text, sizeof last_error.text, format, rest);
    va_end(rest);
    return -1;
}

/* Set the error to `what: errno text` of the call that just failed. */
__attribute__((format(printf, 1, 2))) static inline int fail_errno(const char *format, ...)
{
    int number = errno;
    char what[512];
    va_list rest;
    va_start(rest, format);
    vsnprintf(what, sizeof what, format, rest);
    va_end(rest);
    return fail(number, "%s: %s", what, error_text(number));
}

static inline int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Return the time `ms` after `now`, clamped so that it cannot overflow. */
static inline int64_t after_ms(int64_t now, int64_t ms)
{
    const int64_t limit = INT64_MAX / 4 / 1000000;
    return now + (ms > limit ? limit : ms < -limit ? -limit : ms) * 1000000;
}

/* ----------------------------------------------------------------------------------------------- buffers */

/* A byte queue: bytes are added at the end and consumed from the front. */
struct buffer {
    uint8_t *data;
    size_t start, size, room;
    bool failed;
};

static inline void clear_buffer(struct buffer *b)
{
    free(b->data);
    *b = (struct buffer){.failed = b->failed};
}

/* Return space for `more` bytes at the end, or NULL. The caller raises `size`. */
static inline uint8_t *reserve(struct buffer *b, size_t more)
{
    if (b->failed)
        return NULL;
    if (b->room - b->start - b->size < more && b->start && b->start >= b->room / 2) { /* amortise the move */
        memmove(b->data, b->data + b->start, b->size);
        b->start = 0;
    }
    if (b->room - b->start - b->size < more) {
        size_t room = b->room ? b->room : 512;
        while (room < b->start + b->size + more)
            room *= 2;
        uint8_t *data = realloc(b->data, room);
        if (!data) {
            b->failed = true;
            return NULL;
        }
        b->data = data, b->room = room;
    }
    return b->data + b->start + b->size;
}

static inline void append(struct buffer *b, const void *data, size_t size)
{
    uint8_t *room = size ? reserve(b, size) : NULL;
    if (room) {
        memcpy(room, data, size);
        b->size += size;
    }
}

/* Drop bytes from the front; an emptied large buffer frees its memory, because idle pods must be small. */
static inline void consume(struct buffer *b, size_t size)
{
    b->start += size;
    b->size -= size;
    if (!b->size && b->room > 4096)
        clear_buffer(b);
    else if (!b->size)
        b->start = 0;
}

static inline uint8_t *bytes(struct buffer *b)
{
    return b->data + b->start;
}

/* ------------------------------------------------------------------------------------------------ writing */

/* Start a frame; the returned mark is for end_frame. */
static inline size_t begin_frame(struct buffer *b, int op, uint32_t call)
{
    size_t mark = b->size;
    uint8_t head[HEAD] = {0, 0, 0, 0, (uint8_t)op};
    memcpy(head + 5, &call, 4);
    append(b, head, HEAD);
    return mark;
}

static inline void put_head(struct buffer *b, int key, size_t size)
{
    uint8_t head[FIELD_HEAD] = {(uint8_t)key};
    uint32_t length = (uint32_t)size;
    memcpy(head + 1, &length, 4);
    append(b, head, FIELD_HEAD);
}

static inline void put_bytes(struct buffer *b, int key, const void *data, size_t size)
{
    put_head(b, key, size);
    append(b, data, size);
}

static inline void put_text(struct buffer *b, int key, const char *text)
{
    put_bytes(b, key, text, strlen(text));
}

static inline void put_number(struct buffer *b, int key, int64_t value)
{
    put_bytes(b, key, &value, sizeof value);
}

static inline void end_frame(struct buffer *b, size_t mark)
{
    if (b->failed)
        return;
    uint32_t length = (uint32_t)(b->size - mark - 4);
    memcpy(bytes(b) + mark, &length, 4);
}

static inline void put_failure(struct buffer *b, uint32_t call)
{
    size_t mark = begin_frame(b, FAIL, call);
    put_number(b, NUMBER, last_error.number);
    put_text(b, DATA, last_error.text);
    end_frame(b, mark);
}

/* ------------------------------------------------------------------------------------------------ reading */

struct span {
    const uint8_t *data;
    uint32_t size;
};

/* A request whose field lengths have been checked. */
struct request {
    int op;
    uint32_t call;
    const uint8_t *fields;
    size_t size;
};

static inline bool is_number(int key)
{
    switch (key) {
    case FLAGS: case ROWS: case COLS: case LIMIT: case TIME: case JOB: case NUMBER: case OFFSET: case MODE: case SIZE:
    case ZYGOTE_SIZE: case ZYGOTE_INODES: case ZYGOTE_OWNER: case ZYGOTE_CAPS: case ZYGOTE_FLAGS: case ZYGOTE_SHM:
    case ZYGOTE_PID: case ZYGOTE_PORT: case ZYGOTE_IDS: case ZYGOTE_PIDS:
        return true;
    default:
        return false;
    }
}

/* Return the next field from `*at` on; false after the last. Only for checked requests. */
static inline bool next_field(const struct request *r, size_t *at, int *key, struct span *value)
{
    if (*at >= r->size)
        return false;
    *key = r->fields[*at];
    memcpy(&value->size, r->fields + *at + 1, 4);
    value->data = r->fields + *at + FIELD_HEAD;
    *at += FIELD_HEAD + value->size;
    return true;
}

/* Parse op, call and fields of a frame without its length; false if it is invalid. */
static inline bool parse_request(const uint8_t *body, size_t size, struct request *r)
{
    if (size < HEAD - 4)
        return false;
    r->op = body[0];
    memcpy(&r->call, body + 1, 4);
    r->fields = body + HEAD - 4;
    r->size = size - (HEAD - 4);
    for (size_t at = 0; at < r->size;) {
        uint32_t length;
        if (r->size - at < FIELD_HEAD)
            return false;
        memcpy(&length, r->fields + at + 1, 4);
        if (length > r->size - at - FIELD_HEAD || (is_number(r->fields[at]) && length != 8))
            return false;
        at += FIELD_HEAD + length;
    }
    return true;
}

/* Return 1 with the frame at the front of the bytes and its whole size; 0 if it is incomplete; -1 if it is invalid. */
static inline int split_frame(const uint8_t *data, size_t size, struct request *r, size_t *taken)
{
    uint32_t length;
    if (size < 4)
        return 0;
    memcpy(&length, data, 4);
    if (length > MAX_FRAME)
        return -1;
    if (size - 4 < length)
        return 0;
    *taken = 4 + (size_t)length;
    return parse_request(data + 4, length, r) ? 1 : -1;
}

/* Return the first field of a key; `data` is NULL when there is none. */
static inline struct span field(const struct request *r, int key)
{
    struct span value;
    int found;
    for (size_t at = 0; next_field(r, &at, &found, &value);)
        if (found == key)
            return value;
    return (struct span){NULL, 0};
}

static inline int64_t number(const struct request *r, int key, int64_t otherwise)
{
    struct span value = field(r, key);
    int64_t result = otherwise;
    if (value.data)
        memcpy(&result, value.data, sizeof result);
    return result;
}

/* Copy a field as a string of at most `room` - 1 bytes; false when it is longer or contains a NUL. */
static inline bool text_of(struct span value, char *into, size_t room)
{
    if (value.size >= room || (value.size && memchr(value.data, 0, value.size)))
        return false;
    if (value.size)
        memcpy(into, value.data, value.size);
    into[value.size] = 0;
    return true;
}

#endif
