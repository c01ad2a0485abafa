/* A driver library without a driver: the symbols that the GPU provider uses, and no others.
 *
 * The folder named by FAKE_NVML says what it does, read anew at every call:
 *   init           one number, the answer of nvmlInitWithFlags (absent: 0)
 *   gpus           one line a GPU: UUID|product|memory bytes|event mask|pending retirement|error
 *                  UUID "-" cannot be read; error, if not 0, answers memory questions
 *   events         one line an event: index type data [instance]; appended by a test, consumed in order
 *   mig            one line a MIG device: index of its GPU|instance|UUID|product|memory bytes (absent: none)
 *   calls          appended by us: the name of each init, shutdown, create and free
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10, GPU_IS_LOST = 15, UNKNOWN = 999 };
enum { LINE = 512, MOST_GPUS = 64 };

struct device { int index; };
struct event_set { long consumed; unsigned long long masks[MOST_GPUS]; };
struct event { struct device *device; unsigned long long type, data; unsigned int gpu, compute; };
struct memory { unsigned long long total, free, used; };
struct gpu { char uuid[96], product[96]; unsigned long long memory, mask; int pending, error; };

static struct device devices[2 * MOST_GPUS]; /* the second half: MIG devices, by the line they stand in */

static FILE *control(const char *name, const char *mode) {
    char path[4096];
    const char *folder = getenv("FAKE_NVML");
    if (!folder) return NULL;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return fopen(path, mode);
}

static void record(const char *call) {
    FILE *file = control("calls", "a");
    if (!file) return;
    fprintf(file, "%s\n", call);
    fclose(file);
}

static int read_mig(int index, int *whole, unsigned int *instance, struct gpu *gpu) {
    char line[LINE];
    FILE *file = control("mig", "r");
    if (!file) return 0;
    int at = 0, found = 0;
    while (!found && fgets(line, sizeof line, file)) {
        if (at++ != index) continue;
        found = sscanf(line, "%d|%u|%95[^|]|%95[^|]|%llu", whole, instance, gpu->uuid, gpu->product,
                       &gpu->memory) == 5;
        break;
    }
    fclose(file);
    return found;
}

static int read_gpu(int index, struct gpu *gpu) {
    char line[LINE];
    if (index >= MOST_GPUS) {
        int whole;
        unsigned int instance;
        memset(gpu, 0, sizeof *gpu);
        return read_mig(index - MOST_GPUS, &whole, &instance, gpu);
    }
    FILE *file = control("gpus", "r");
    if (!file) return 0;
    int at = 0, found = 0;
    while (fgets(line, sizeof line, file)) {
        if (at++ != index) continue;
        found = sscanf(line, "%95[^|]|%95[^|]|%llu|%llu|%d|%d", gpu->uuid, gpu->product, &gpu->memory,
                       &gpu->mask, &gpu->pending, &gpu->error) == 6;
        break;
    }
    fclose(file);
    return found;
}

int nvmlInitWithFlags(unsigned int flags) {
    int answer = 0;
    FILE *file = control("init", "r");
    (void)flags;
    if (file) {
        if (fscanf(file, "%d", &answer) != 1) answer = UNKNOWN;
        fclose(file);
    }
    record("init");
    for (int i = 0; i < 2 * MOST_GPUS; i++) devices[i].index = i;
    return answer;
}

int nvmlShutdown(void) { record("shutdown"); return SUCCESS; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case NOT_SUPPORTED: return "Not Supported";
    case TIMEOUT: return "Timeout";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Fake error";
    }
}

int nvmlSystemGetDriverVersion(char *text, unsigned int length) {
    snprintf(text, length, "575.57.08");
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    struct gpu gpu;
    *count = 0;
    while (*count < MOST_GPUS && read_gpu((int)*count, &gpu)) (*count)++;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct device **device) {
    if (index >= MOST_GPUS) return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned int *count) {
    (void)device;
    *count = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, unsigned int index, struct device **mig) {
    struct gpu gpu;
    int whole;
    unsigned int instance, seen = 0;
    for (int at = 0; read_mig(at, &whole, &instance, &gpu); at++) {
        if (whole != device->index || seen++ != index) continue;
        *mig = &devices[MOST_GPUS + at];
        return SUCCESS;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetGpuInstanceId(struct device *device, unsigned int *instance) {
    struct gpu gpu;
    int whole;
    if (!read_mig(device->index - MOST_GPUS, &whole, instance, &gpu)) return NOT_FOUND;
    return SUCCESS;
}

int nvmlDeviceGetUUID(struct device *device, char *text, unsigned int length) {
    struct gpu gpu;
    if (!read_gpu(device->index, &gpu) || strcmp(gpu.uuid, "-") == 0) return UNKNOWN;
    if (gpu.error == GPU_IS_LOST) return GPU_IS_LOST;
    snprintf(text, length, "%s", gpu.uuid);
    return SUCCESS;
}

int nvmlDeviceGetName(struct device *device, char *text, unsigned int length) {
    struct gpu gpu;
    if (!read_gpu(device->index, &gpu)) return UNKNOWN;
    snprintf(text, length, "%s", gpu.product);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(struct device *device, struct memory *memory) {
    struct gpu gpu;
    if (!read_gpu(device->index, &gpu)) return UNKNOWN;
    if (gpu.error) return gpu.error;
    memory->total = gpu.memory;
    memory->free = gpu.memory;
    memory->used = 0;
    return SUCCESS;
}

int nvmlDeviceGetRetiredPagesPendingStatus(struct device *device, unsigned int *pending) {
    struct gpu gpu;
    if (!read_gpu(device->index, &gpu)) return UNKNOWN;
    *pending = (unsigned int)gpu.pending;
    return SUCCESS;
}

int nvmlDeviceGetSupportedEventTypes(struct device *device, unsigned long long *mask) {
    struct gpu gpu;
    if (!read_gpu(device->index, &gpu)) return UNKNOWN;
    if (gpu.error == NOT_SUPPORTED) return NOT_SUPPORTED;
    *mask = gpu.mask;
    return SUCCESS;
}

int nvmlEventSetCreate(struct event_set **set) {
    FILE *file = control("events", "r");
    *set = calloc(1, sizeof **set);
    if (*set && file && fseek(file, 0, SEEK_END) == 0) (*set)->consumed = ftell(file); /* the past is past */
    if (file) fclose(file);
    record("create");
    return *set ? SUCCESS : UNKNOWN;
}

int nvmlDeviceRegisterEvents(struct device *device, unsigned long long mask, struct event_set *set) {
    set->masks[device->index] |= mask;
    return SUCCESS;
}

/* The next line of `events` that nobody took. An index of -1 says that some GPU is lost. */
static int next_event(struct event_set *set, struct event *event) {
    char line[LINE];
    int index, answer = TIMEOUT;
    FILE *file = control("events", "r");
    if (!file) return TIMEOUT;
    fseek(file, set->consumed, SEEK_SET);
    while (answer == TIMEOUT && fgets(line, sizeof line, file) && strchr(line, '\n')) {
        set->consumed = ftell(file);
        event->gpu = 0xFFFFFFFF; /* of the GPU as a whole */
        if (sscanf(line, "%d %llu %llu %u", &index, &event->type, &event->data, &event->gpu) < 3) continue;
        if (index < 0) answer = GPU_IS_LOST;
        else if (set->masks[index] & event->type) {
            event->device = &devices[index];
            answer = SUCCESS;
        }
    }
    fclose(file);
    return answer;
}

int nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned int timeout_ms) {
    for (unsigned int waited = 0;; waited += 5) {
        int answer = next_event(set, event);
        if (answer != TIMEOUT || waited >= timeout_ms) return answer;
        usleep(5000);
    }
}

int nvmlEventSetFree(struct event_set *set) { record("free"); free(set); return SUCCESS; }
