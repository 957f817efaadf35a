/* Disk images on loop devices. Nothing of them outlives the zygote: the file has no name, the device is released with its
 * last mount, and the mounts are in the zygote's mount namespace. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/ioctl.h>

#include "processes.h"
#include "zygote.h"

enum { GET_FREE = 0x4C82, CONFIGURE = 0x4C0A, AUTOCLEAR = 4, ATTEMPTS = 64 };

/* The kernel's struct loop_config with its loop_info64, of which only the flags are set. */
struct loop_config {
    uint32_t file, block_size;
    uint64_t numbers[5];
    uint32_t number, encryption, key_size, flags;
    uint8_t names[64 + 64 + 32];
    uint64_t init[2], reserved[8];
};
_Static_assert(sizeof(struct loop_config) == 304, "struct loop_config has 304 bytes");

int attach_loop(int file, char path[32], int *device)
{
    const struct loop_config config = {.file = (uint32_t)file, .flags = AUTOCLEAR};
    int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    if (control < 0)
        return fail_errno("/dev/loop-control");
    int failed = -1;
    *device = -1;
    for (int i = 0; failed && i < ATTEMPTS; i++) { /* another process may take the free one before us */
        int number = ioctl(control, GET_FREE);
        if (number < 0) {
            fail_errno("find a free loop device");
            break;
        }
        snprintf(path, 32, "/dev/loop%d", number);
        if ((*device = open(path, O_RDWR | O_CLOEXEC)) < 0) {
            fail_errno("%s", path);
            break;
        }
        if (!(failed = ioctl(*device, CONFIGURE, &config)))
            break;
        failed = fail_errno("%s", path);
        close(*device);
        if (last_error.number != EBUSY)
            break;
    }
    close(control);
    return failed;
}

void close_in_child(int tree)
{
    int hold[2], kept[2];
    char end;
    if (pipe2(hold, O_CLOEXEC)) {
        close(tree);
        return;
    }
    pid_t child = fork(); /* reaped with the pods */
    if (child == 0) {
        kept[0] = tree, kept[1] = hold[0];
        close_others(kept, 2);
        _exit(read(hold[0], &end, 1) < 0); /* until ours is closed: then that of this process is the last */
    }
    close(tree);
    close(hold[0]);
    close(hold[1]);
}
