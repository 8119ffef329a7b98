/* A small NVML (libnvidia-ml.so.1) for tests: devices and processes as a state file describes
 * them, so that the real Python client runs without an NVIDIA driver.
 *
 * LOCALKV_NVML_STUB_STATE names the state file. It is read anew on every call, so a test can
 * change it at any time. Its lines, with sizes in bytes:
 *
 *   devices N              how many devices (default 1, at most 4)
 *   total N                memory of each device (default 24 GiB)
 *   reserved N             the driver's own part of it (default 0)
 *   base N                 held on each device by processes that are not listed (default 0)
 *   context N              fixed cost of every "rss" process (default 0)
 *   mig N                  current MIG mode: 0 or 1; without the line: not supported
 *   process WHO HOW [KIND] [DEVICE]
 *       WHO    pid:N, or maps:TEXT or cmdline:TEXT for every process whose /proc/PID/maps or
 *              cmdline holds TEXT and whose environment names the same state file
 *       HOW    rss (context plus the process's RssAnon), na (not available) or a number
 *       KIND   compute (default), graphics or both
 *       DEVICE index of the device (default 0)
 *
 * LOCALKV_NVML_STUB_ERROR makes functions fail: "nvmlInitWithFlags:9,nvmlDeviceGetUUID:4".
 * NVML_STUB_OLD leaves out what older libraries lack.
 *
 * The measured process loads this library too, so it takes all its memory when it is opened.
 */

#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef unsigned long long u64;

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
};

enum { MAX_DEVICES = 4, MAX_RULES = 16, MAX_PROCESSES = 64, TEXT = 128 };
enum { COMPUTE = 1, GRAPHICS = 2 };

static const u64 NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFFULL;
static const unsigned NO_INSTANCE = 0xFFFFFFFFU;

struct nvmlDevice_st {
    unsigned index;
};
typedef struct nvmlDevice_st *nvmlDevice_t;

typedef struct {
    u64 total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned pid;
    u64 usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

struct rule {
    char who[TEXT];
    char how[32];
    int kinds;
    unsigned device;
};

struct state {
    unsigned devices;
    int mig;
    u64 total, reserved, base, context;
    struct rule rules[MAX_RULES];
    int rule_count;
};

struct holder {
    unsigned pid;
    u64 bytes;
    int kinds;
};

static struct nvmlDevice_st device_table[MAX_DEVICES] = {{0}, {1}, {2}, {3}};
static int open_count;

static const char *state_path(void)
{
    const char *path = getenv("LOCALKV_NVML_STUB_STATE");
    return path ? path : "";
}

/* Whole contents of a file in a buffer of the caller's, ended by a zero byte. */
static size_t read_file(const char *path, char *buffer, size_t size)
{
    size_t length = 0;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file >= 0) {
        ssize_t got;
        while (length + 1 < size && (got = read(file, buffer + length, size - 1 - length)) > 0)
            length += (size_t)got;
        close(file);
    }
    buffer[length] = '\0';
    return length;
}

static char scratch[1 << 20];

static bool file_holds(unsigned pid, const char *name, const char *text, size_t text_length)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/%s", pid, name);
    size_t length = read_file(path, scratch, sizeof scratch);
    return memmem(scratch, length, text, text_length) != NULL;
}

static u64 rss_anon(unsigned pid)
{
    char path[64], buffer[8192];
    u64 kib = 0;
    snprintf(path, sizeof path, "/proc/%u/status", pid);
    read_file(path, buffer, sizeof buffer);
    const char *field = strstr(buffer, "\nRssAnon:");
    if (field)
        sscanf(field, "\nRssAnon: %llu kB", &kib);
    return kib * 1024;
}

static void parse_rule(struct state *state, const char *line)
{
    char kind[16] = "compute";
    struct rule *rule = &state->rules[state->rule_count];
    if (state->rule_count == MAX_RULES)
        return;
    rule->device = 0;
    if (sscanf(line, "process %127s %31s %15s %u", rule->who, rule->how, kind, &rule->device) < 2)
        return;
    rule->kinds = strcmp(kind, "both") == 0       ? COMPUTE | GRAPHICS
                  : strcmp(kind, "graphics") == 0 ? GRAPHICS
                                                  : COMPUTE;
    state->rule_count++;
}

static void load_state(struct state *state)
{
    static char buffer[16384];
    *state = (struct state){.devices = 1, .mig = -1, .total = 24ULL << 30};
    read_file(state_path(), buffer, sizeof buffer);
    char *rest = NULL;
    for (char *line = strtok_r(buffer, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        sscanf(line, "devices %u", &state->devices);
        sscanf(line, "total %llu", &state->total);
        sscanf(line, "reserved %llu", &state->reserved);
        sscanf(line, "base %llu", &state->base);
        sscanf(line, "context %llu", &state->context);
        sscanf(line, "mig %d", &state->mig);
        if (strncmp(line, "process ", 8) == 0)
            parse_rule(state, line);
    }
    if (state->devices > MAX_DEVICES)
        state->devices = MAX_DEVICES;
}

static void add_holder(const struct state *state, const struct rule *rule, unsigned pid,
                       struct holder *holders, int *count)
{
    if (*count == MAX_PROCESSES)
        return;
    struct holder *holder = &holders[(*count)++];
    holder->pid = pid;
    holder->kinds = rule->kinds;
    if (strcmp(rule->how, "rss") == 0)
        holder->bytes = state->context + rss_anon(pid);
    else if (strcmp(rule->how, "na") == 0)
        holder->bytes = NOT_AVAILABLE;
    else
        holder->bytes = strtoull(rule->how, NULL, 10);
}

/* Every process of this test (its environment names the same state file) that a rule means. */
static void search_processes(const struct state *state, const struct rule *rule,
                             struct holder *holders, int *count)
{
    char own[512];
    const char *text = strchr(rule->who, ':') + 1;
    const char *file = rule->who[0] == 'm' ? "maps" : "cmdline";
    int length = snprintf(own, sizeof own, "LOCALKV_NVML_STUB_STATE=%s", state_path());
    DIR *processes = opendir("/proc");
    if (!processes || length < 0 || (size_t)length >= sizeof own)
        return;
    for (struct dirent *entry; (entry = readdir(processes));) {
        unsigned pid = (unsigned)strtoul(entry->d_name, NULL, 10);
        if (!isdigit((unsigned char)entry->d_name[0]))
            continue;
        if (file_holds(pid, "environ", own, (size_t)length + 1) &&
            file_holds(pid, file, text, strlen(text)))
            add_holder(state, rule, pid, holders, count);
    }
    closedir(processes);
}

static int find_holders(const struct state *state, unsigned device, struct holder *holders)
{
    int count = 0;
    for (int i = 0; i < state->rule_count; i++) {
        const struct rule *rule = &state->rules[i];
        if (rule->device != device)
            continue;
        if (strncmp(rule->who, "pid:", 4) == 0)
            add_holder(state, rule, (unsigned)strtoul(rule->who + 4, NULL, 10), holders, &count);
        else if (strchr(rule->who, ':'))
            search_processes(state, rule, holders, &count);
    }
    return count;
}

/* The error a test asked for, or the one every call gives before nvmlInit. */
static nvmlReturn_t fault(const char *function, bool needs_init)
{
    const char *wanted = getenv("LOCALKV_NVML_STUB_ERROR");
    size_t length = strlen(function);
    for (const char *at = wanted; at && (at = strstr(at, function)); at += length)
        if ((at == wanted || at[-1] == ',') && at[length] == ':')
            return atoi(at + length + 1);
    return needs_init && open_count == 0 ? UNINITIALIZED : SUCCESS;
}

#define FAIL_IF_ASKED(needs_init)                         \
    do {                                                  \
        nvmlReturn_t failed = fault(__func__, needs_init); \
        if (failed != SUCCESS)                            \
            return failed;                                \
    } while (0)

static nvmlReturn_t copy_text(char *to, unsigned size, const char *text)
{
    return snprintf(to, size, "%s", text) < (int)size ? SUCCESS : INSUFFICIENT_SIZE;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    static char text[32];
    snprintf(text, sizeof text, "stub error %d", result);
    return text;
}

nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    FAIL_IF_ASKED(false);
    if (access(state_path(), R_OK) != 0)
        return DRIVER_NOT_LOADED;
    memset(scratch, 1, sizeof scratch);
    open_count++;
    return SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

nvmlReturn_t nvmlShutdown(void)
{
    FAIL_IF_ASKED(true);
    open_count--;
    return SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    FAIL_IF_ASKED(true);
    return copy_text(version, length, "550.54.15");
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
    FAIL_IF_ASKED(true);
    return copy_text(version, length, "12.550.54.15");
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    FAIL_IF_ASKED(true);
    *version = 12040;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    struct state state;
    FAIL_IF_ASKED(true);
    load_state(&state);
    *count = state.devices;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    struct state state;
    FAIL_IF_ASKED(true);
    load_state(&state);
    if (index >= state.devices)
        return INVALID_ARGUMENT;
    *device = &device_table[index];
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length)
{
    (void)device;
    FAIL_IF_ASKED(true);
    return copy_text(name, length, "NVIDIA Stub 24GB");
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length)
{
    char text[64];
    FAIL_IF_ASKED(true);
    snprintf(text, sizeof text, "GPU-00000000-0000-0000-0000-%012u", device->index);
    return copy_text(uuid, length, text);
}

static u64 device_used(const struct state *state, unsigned device)
{
    struct holder holders[MAX_PROCESSES];
    u64 used = state->base;
    int count = find_holders(state, device, holders);
    for (int i = 0; i < count; i++)
        if (holders[i].bytes != NOT_AVAILABLE)
            used += holders[i].bytes;
    return used;
}

/* The first form counts the reserved part as used. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    struct state state;
    FAIL_IF_ASKED(true);
    load_state(&state);
    memory->total = state.total;
    memory->used = state.reserved + device_used(&state, device->index);
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

static nvmlReturn_t list_processes(nvmlDevice_t device, int kind, unsigned *count,
                                   nvmlProcessInfo_t *infos)
{
    struct state state;
    struct holder holders[MAX_PROCESSES];
    unsigned wanted = 0, room = infos ? *count : 0;
    load_state(&state);
    int held = find_holders(&state, device->index, holders);
    for (int i = 0; i < held; i++) {
        if (!(holders[i].kinds & kind))
            continue;
        if (wanted < room)
            infos[wanted] = (nvmlProcessInfo_t){holders[i].pid, holders[i].bytes, NO_INSTANCE,
                                                NO_INSTANCE};
        wanted++;
    }
    *count = wanted;
    return wanted > room ? INSUFFICIENT_SIZE : SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count,
                                                     nvmlProcessInfo_t *infos)
{
    FAIL_IF_ASKED(true);
    return list_processes(device, COMPUTE, count, infos);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v2(nvmlDevice_t device, unsigned *count,
                                                      nvmlProcessInfo_t *infos)
{
    FAIL_IF_ASKED(true);
    return list_processes(device, GRAPHICS, count, infos);
}

#ifndef NVML_STUB_OLD

typedef struct {
    unsigned version;
    u64 total, reserved, free, used;
} nvmlMemory_v2_t;

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    struct state state;
    FAIL_IF_ASKED(true);
    if (memory->version != (sizeof(nvmlMemory_v2_t) | (2U << 24)))
        return INVALID_ARGUMENT;
    load_state(&state);
    memory->total = state.total;
    memory->reserved = state.reserved;
    memory->used = device_used(&state, device->index);
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                     nvmlProcessInfo_t *infos)
{
    FAIL_IF_ASKED(true);
    return list_processes(device, COMPUTE, count, infos);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                      nvmlProcessInfo_t *infos)
{
    FAIL_IF_ASKED(true);
    return list_processes(device, GRAPHICS, count, infos);
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    struct state state;
    (void)device;
    FAIL_IF_ASKED(true);
    load_state(&state);
    if (state.mig < 0)
        return NOT_SUPPORTED;
    *current = *pending = (unsigned)state.mig;
    return SUCCESS;
}

#endif
