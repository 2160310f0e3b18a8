/* A stand-in for NVIDIA's libnvidia-ml.so.1 whose GPUs come from a JSON file.
 *
 * The environment variable NVML_STUB_SCENARIO names the file; README.md has its format.  Both are
 * looked at on every call, so a test can replace the file while something reads it.
 *
 * Every exported function has the shape
 *
 *     enter...()  takes the lock, brings the scenario up to date, finds the device and applies
 *                 what the scenario says must fail;
 *     the answer  read from the scenario: a value that is absent or null is "not supported";
 *     leave...()  counts the call and gives up the lock. */

#define _POSIX_C_SOURCE 200809L

#include "json.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum {
    MAX_DEVICES = 64,
    MAX_INSTANCES = 8,     /* MIG instances of one device */
    DEFAULT_MAX_MIG = 7,   /* what every MIG-capable data centre GPU answers */
    DEFAULT_SWITCHES = 6,  /* NVSwitches of one island: an HGX A100 board has six */
    FIRST_SWITCH_BUS = 0xC4,
    MEBIBYTE = 1 << 20,
};

/* ---- what nvml.h would give: codes and layouts that are part of the binary interface ---- */

typedef enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_FUNCTION_NOT_FOUND = 13,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_RESET_REQUIRED = 16,
    NVML_ERROR_OPERATING_SYSTEM = 17,
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999,
} nvmlReturn_t;

enum {
    NVML_TEMPERATURE_GPU = 0,
    NVML_TEMPERATURE_THRESHOLD_SHUTDOWN = 0,
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1,
    NVML_TEMPERATURE_THRESHOLD_GPU_MAX = 3,
    NVML_CLOCK_COUNT = 4,
    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0,
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1,
    NVML_NVLINK_DEVICE_TYPE_GPU = 0,
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2,
    NVML_TOPOLOGY_INTERNAL = 0,
    NVML_TOPOLOGY_NODE = 40,
    NVML_TOPOLOGY_SYSTEM = 50,
    NVML_P2P_CAPS_INDEX_NVLINK = 2,
    NVML_P2P_CAPS_INDEX_PCI = 4,
    NVML_P2P_STATUS_OK = 0,
    NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED = 1,
    NVML_P2P_STATUS_NOT_SUPPORTED = 5,
};

#define NVML_NO_INSTANCE 0xFFFFFFFFu
#define NVML_VALUE_NOT_AVAILABLE (~0ULL)

/* How NVML stamps a versioned structure: its size, and its version in the top byte. */
#define STRUCT_VERSION(type, version) ((unsigned)(sizeof(type) | (version) << 24))

/* A handle stays valid for as long as the library is loaded: it holds numbers, never a pointer
 * into the scenario, which a reload frees. */
typedef struct {
    unsigned device;
    int instance; /* -1 for the GPU itself */
} handle;

typedef handle *nvmlDevice_t;

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device;
    unsigned pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned version;
    unsigned domain, bus, device;
    unsigned pciDeviceId, pciSubSystemId;
    unsigned baseClass, subClass;
    char busId[32];
} nvmlPciInfoExt_v1_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned gpu, memory;
} nvmlUtilization_t;

typedef struct {
    unsigned version, sensorType;
    int temperature;
} nvmlTemperature_v1_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;

/* Version 3 of the process list changed its meaning, not its layout. */
typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_v2_t;

typedef struct {
    unsigned pid;
    unsigned long long timeStamp;
    unsigned smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;

typedef struct {
    unsigned multiprocessorCount;
    unsigned sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount;
    unsigned sharedJpegCount, sharedOfaCount;
    unsigned gpuInstanceSliceCount, computeInstanceSliceCount;
    unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;

/* ---- the scenario, kept up to date with its file ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Everything below is read and written with the lock held. */
static struct {
    char path[4096];
    struct stat stamp;   /* of the file that `root` was read from */
    bool seen;           /* whether `path` and `stamp` hold anything */
    nvmlReturn_t status; /* what a call gets when there is no scenario to answer from */
    json *root;
    const json *devices[MAX_DEVICES];
    unsigned count;
} scenario;

static unsigned init_count;
static unsigned long long successes[MAX_DEVICES]; /* answered calls since the last nvmlInit */

static void complain(const char *about, const char *problem)
{
    fprintf(stderr, "nvml_stub: %s: %s%s\n", scenario.path, about, problem);
}

static void forget_scenario(nvmlReturn_t status)
{
    json_free(scenario.root);
    scenario.root = NULL;
    scenario.count = 0;
    scenario.seen = false;
    scenario.status = status;
}

static bool same_file(const struct stat *a, const struct stat *b)
{
    return a->st_ino == b->st_ino && a->st_dev == b->st_dev && a->st_size == b->st_size
           && a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

/* The whole file, which the caller frees, with the stamp of exactly the file that was read. */
static char *read_file(const char *path, struct stat *stamp, size_t *length)
{
    char *text = NULL;
    FILE *file = fopen(path, "re");

    *length = 0;
    if (file == NULL)
        return NULL;
    if (fstat(fileno(file), stamp) == 0) {
        text = malloc((size_t)stamp->st_size + 1);
        if (text != NULL)
            *length = fread(text, 1, (size_t)stamp->st_size, file);
    }
    fclose(file);
    return text;
}

/* What is wrong with the document as a scenario, or NULL. */
static const char *shape_error(const json *root)
{
    const json *devices = json_member(root, "devices");

    if (root->type != JSON_OBJECT)
        return "the scenario is not an object";
    if (json_is_null(devices))
        return NULL;
    if (devices->type != JSON_ARRAY)
        return "\"devices\" is not an array";
    if (devices->count > MAX_DEVICES)
        return "too many devices";
    for (const json *gpu = devices->first; gpu != NULL; gpu = gpu->next) {
        const json *instances = json_path(gpu, "mig.instances");
        if (gpu->type != JSON_OBJECT)
            return "a device is not an object";
        if (!json_is_null(instances)
            && (instances->type != JSON_ARRAY || instances->count > MAX_INSTANCES))
            return "\"mig.instances\" is not an array, or too long";
    }
    return NULL;
}

static void load_scenario(const char *path)
{
    char error[128];
    size_t length;

    forget_scenario(NVML_ERROR_DRIVER_NOT_LOADED);
    char *text = read_file(path, &scenario.stamp, &length);
    if (text == NULL)
        return;
    snprintf(scenario.path, sizeof scenario.path, "%s", path);
    /* A bad file counts as seen too: it is complained of once, not at every call. */
    scenario.seen = true;
    scenario.root = json_parse(text, length, error, sizeof error);
    free(text);

    const char *wrong = scenario.root == NULL ? error : shape_error(scenario.root);
    if (wrong != NULL) {
        complain("", wrong);
        forget_scenario(NVML_ERROR_UNKNOWN);
        scenario.seen = true;
        return;
    }
    const json *devices = json_member(scenario.root, "devices");
    for (const json *gpu = devices ? devices->first : NULL; gpu != NULL; gpu = gpu->next)
        scenario.devices[scenario.count++] = gpu;
    scenario.status = NVML_SUCCESS;
}

static void refresh_scenario(void)
{
    const char *path = getenv("NVML_STUB_SCENARIO");
    struct stat now;

    if (path == NULL || stat(path, &now) != 0)
        forget_scenario(NVML_ERROR_DRIVER_NOT_LOADED);
    else if (!scenario.seen || strcmp(path, scenario.path) != 0
             || !same_file(&now, &scenario.stamp))
        load_scenario(path);
}

__attribute__((destructor)) static void release(void)
{
    /* Only tried: in a child forked in the middle of another thread's call, nobody is left to give
     * the lock up, and the child must still be able to exit. */
    if (pthread_mutex_trylock(&lock) != 0)
        return;
    forget_scenario(NVML_ERROR_DRIVER_NOT_LOADED);
    pthread_mutex_unlock(&lock);
}

/* ---- reading values ---- */

static nvmlReturn_t read_u64(const json *object, const char *path, unsigned long long *out)
{
    const json *value = json_path(object, path);

    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (json_is_null(value))
        return NVML_ERROR_NOT_SUPPORTED;
    if (value->type == JSON_NUMBER && value->is_integer) {
        *out = value->integer;
    } else if (value->type == JSON_BOOL) {
        *out = value->boolean;
    } else {
        /* A slip in a scenario must not pass for a GPU that lacks the feature. */
        complain(path, " is not a non-negative integer");
        return NVML_ERROR_UNKNOWN;
    }
    return NVML_SUCCESS;
}

static nvmlReturn_t read_unsigned(const json *object, const char *path, unsigned *out)
{
    unsigned long long value = 0;
    nvmlReturn_t result = out ? read_u64(object, path, &value) : NVML_ERROR_INVALID_ARGUMENT;

    if (result == NVML_SUCCESS)
        *out = (unsigned)value;
    return result;
}

/* For values of which an absent one has a natural meaning. */
static unsigned long long u64_or(const json *object, const char *path, unsigned long long fallback)
{
    unsigned long long value;
    return read_u64(object, path, &value) == NVML_SUCCESS ? value : fallback;
}

static unsigned unsigned_or(const json *object, const char *path, unsigned fallback)
{
    return (unsigned)u64_or(object, path, fallback);
}

static const char *text_of(const json *object, const char *path)
{
    const json *value = json_path(object, path);
    return value != NULL && value->type == JSON_STRING ? value->string : NULL;
}

static nvmlReturn_t copy_text(const char *text, char *out, unsigned length)
{
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (text == NULL)
        return NVML_ERROR_NOT_SUPPORTED;
    if (strlen(text) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return NVML_SUCCESS;
}

/* ---- entering and leaving a call ---- */

/* What a call is about: `node` is the instance for a MIG handle, otherwise the GPU, so a field an
 * instance does not have is not supported on its handle. */
typedef struct {
    unsigned index;
    int instance;
    const json *gpu;
    const json *node;
} target;

/* "nvmlDeviceGetMemoryInfo" stands for nvmlDeviceGetMemoryInfo_v2 as well, and
 * "nvmlDeviceGetTemperature" for nvmlDeviceGetTemperatureV: those endings are versions. */
static bool names_function(const char *name, const char *function)
{
    size_t length = strlen(name);

    if (strncmp(name, function, length) != 0)
        return false;
    const char *ending = function + length;
    return *ending == '\0' || strcmp(ending, "V") == 0 || strncmp(ending, "_v", 2) == 0;
}

/* The code that an "errors" object forces upon this function, or success. */
static nvmlReturn_t forced_error(const json *owner, const char *function)
{
    const json *errors = json_member(owner, "errors");

    for (const json *entry = errors ? errors->first : NULL; entry != NULL; entry = entry->next)
        if (entry->key != NULL && names_function(entry->key, function))
            return (nvmlReturn_t)entry->integer;
    return NVML_SUCCESS;
}

static nvmlReturn_t enter(void)
{
    pthread_mutex_lock(&lock);
    refresh_scenario();
    return init_count == 0 ? NVML_ERROR_UNINITIALIZED : scenario.status;
}

static nvmlReturn_t leave(nvmlReturn_t result)
{
    pthread_mutex_unlock(&lock);
    return result;
}

static const json *driver(void)
{
    return json_member(scenario.root, "driver");
}

static nvmlReturn_t enter_system(const char *function)
{
    nvmlReturn_t result = enter();
    return result == NVML_SUCCESS ? forced_error(driver(), function) : result;
}

static handle handles[MAX_DEVICES][1 + MAX_INSTANCES];

static nvmlDevice_t handle_of(unsigned device, int instance)
{
    handle *h = &handles[device][instance + 1];
    *h = (handle){device, instance};
    return h;
}

static bool is_our_handle(const handle *h)
{
    uintptr_t offset = (uintptr_t)h - (uintptr_t)handles; /* huge for a pointer below the array */
    return offset < sizeof handles && offset % sizeof(handle) == 0;
}

static bool is_lost(unsigned index)
{
    const json *gpu = scenario.devices[index];
    return u64_or(gpu, "lost", 0) || u64_or(gpu, "lost_at_handle", 0)
           || successes[index] >= u64_or(gpu, "lost_after_calls", ~0ULL);
}

static const json *instance_at(const json *gpu, size_t index)
{
    if (!u64_or(gpu, "mig.enabled", 0))
        return NULL;
    return json_item(json_path(gpu, "mig.instances"), index);
}

/* Finds what a handle stands for now; the scenario may have changed since it was given out. */
static nvmlReturn_t find_target(const handle *h, const char *function, target *out)
{
    *out = (target){.index = MAX_DEVICES};
    if (!is_our_handle(h) || h->device >= scenario.count)
        return NVML_ERROR_INVALID_ARGUMENT;
    out->gpu = out->node = scenario.devices[h->device];
    out->instance = h->instance;
    if (h->instance >= 0) {
        out->node = instance_at(out->gpu, (size_t)h->instance);
        if (out->node == NULL)
            return NVML_ERROR_INVALID_ARGUMENT;
    }
    out->index = h->device;
    return is_lost(out->index) ? NVML_ERROR_GPU_IS_LOST : forced_error(out->node, function);
}

static nvmlReturn_t enter_device(const handle *h, const char *function, target *out)
{
    nvmlReturn_t result = enter();

    *out = (target){.index = MAX_DEVICES};
    return result == NVML_SUCCESS ? find_target(h, function, out) : result;
}

static nvmlReturn_t leave_device(const target *t, nvmlReturn_t result)
{
    if (result == NVML_SUCCESS && t->index < MAX_DEVICES)
        successes[t->index]++;
    return leave(result);
}

static bool is_mig(const target *t)
{
    return t->instance >= 0;
}

/* ---- library ---- */

static nvmlReturn_t start(void)
{
    pthread_mutex_lock(&lock);
    refresh_scenario();
    nvmlReturn_t result = scenario.status;
    if (result == NVML_SUCCESS)
        result = (nvmlReturn_t)unsigned_or(driver(), "init", NVML_SUCCESS);
    if (result == NVML_SUCCESS) {
        init_count++;
        memset(successes, 0, sizeof successes);
    }
    return leave(result);
}

nvmlReturn_t nvmlInit(void)
{
    return start();
}

nvmlReturn_t nvmlInit_v2(void)
{
    return start();
}

nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return start();
}

nvmlReturn_t nvmlShutdown(void)
{
    pthread_mutex_lock(&lock);
    nvmlReturn_t result = init_count == 0 ? NVML_ERROR_UNINITIALIZED : NVML_SUCCESS;
    if (init_count > 0)
        init_count--;
    return leave(result);
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    switch (result) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_ERROR_UNINITIALIZED:
        return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_ERROR_NO_PERMISSION:
        return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND:
        return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT:
        return "Timeout";
    case NVML_ERROR_FUNCTION_NOT_FOUND:
        return "Function Not Found";
    case NVML_ERROR_GPU_IS_LOST:
        return "GPU is lost";
    case NVML_ERROR_RESET_REQUIRED:
        return "GPU requires restart";
    case NVML_ERROR_OPERATING_SYSTEM:
        return "The operating system has blocked the request.";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "Driver/library version mismatch";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
        return "Argument version mismatch";
    case NVML_ERROR_UNKNOWN:
        break;
    }
    return "Unknown Error";
}

/* ---- system ---- */

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    nvmlReturn_t result = enter_system(__func__);
    if (result == NVML_SUCCESS)
        result = copy_text(text_of(driver(), "version"), version, length);
    return leave(result);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length)
{
    nvmlReturn_t result = enter_system(__func__);
    if (result == NVML_SUCCESS)
        result = copy_text(text_of(driver(), "nvml"), version, length);
    return leave(result);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    nvmlReturn_t result = enter_system(__func__);
    if (result == NVML_SUCCESS)
        result = read_unsigned(driver(), "cuda", (unsigned *)version);
    return leave(result);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length)
{
    (void)pid, (void)name, (void)length;
    nvmlReturn_t result = enter_system(__func__);
    return leave(result == NVML_SUCCESS ? NVML_ERROR_NOT_FOUND : result);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    nvmlReturn_t result = enter_system(__func__);
    if (result == NVML_SUCCESS && count == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *count = scenario.count;
    return leave(result);
}

nvmlReturn_t nvmlDeviceGetCount(unsigned *count)
{
    return nvmlDeviceGetCount_v2(count);
}

/* ---- handles ---- */

/* A lost GPU still has a handle, unless the scenario takes that away too. */
static nvmlReturn_t give_handle(unsigned device, int instance, const char *function,
                                nvmlDevice_t *out)
{
    const json *gpu = scenario.devices[device];

    if (u64_or(gpu, "lost_at_handle", 0))
        return NVML_ERROR_GPU_IS_LOST;
    nvmlReturn_t result = forced_error(gpu, function);
    if (result == NVML_SUCCESS)
        *out = handle_of(device, instance);
    return result;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    nvmlReturn_t result = enter();
    if (result == NVML_SUCCESS)
        result = device != NULL && index < scenario.count
                     ? give_handle(index, -1, __func__, device)
                     : NVML_ERROR_INVALID_ARGUMENT;
    return leave(result);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static bool has_uuid(const json *node, const char *uuid)
{
    const char *own = text_of(node, "uuid");
    return own != NULL && strcmp(own, uuid) == 0;
}

static nvmlReturn_t find_uuid(const char *uuid, const char *function, nvmlDevice_t *out)
{
    for (unsigned device = 0; device < scenario.count; device++) {
        const json *gpu = scenario.devices[device];
        const json *mig;

        if (has_uuid(gpu, uuid))
            return give_handle(device, -1, function, out);
        for (int i = 0; (mig = instance_at(gpu, (size_t)i)) != NULL; i++)
            if (has_uuid(mig, uuid))
                return give_handle(device, i, function, out);
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    nvmlReturn_t result = enter();
    if (result == NVML_SUCCESS)
        result = uuid != NULL && device != NULL ? find_uuid(uuid, __func__, device)
                                                : NVML_ERROR_INVALID_ARGUMENT;
    return leave(result);
}

typedef struct {
    unsigned domain, bus, device;
} pci_address;

/* "00000000:07:00.0", "0000:07:00.0" and "07:00.0" are the same place. */
static bool parse_address(const char *text, pci_address *out)
{
    *out = (pci_address){0};
    if (text == NULL)
        return false;
    if (sscanf(text, "%x:%x:%x", &out->domain, &out->bus, &out->device) == 3)
        return true;
    out->domain = 0;
    return sscanf(text, "%x:%x", &out->bus, &out->device) == 2;
}

static bool same_address(const pci_address *a, const pci_address *b)
{
    return a->domain == b->domain && a->bus == b->bus && a->device == b->device;
}

static nvmlReturn_t find_bus_id(const char *text, const char *function, nvmlDevice_t *out)
{
    pci_address wanted, own;

    if (!parse_address(text, &wanted))
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned device = 0; device < scenario.count; device++)
        if (parse_address(text_of(scenario.devices[device], "pci_bus_id"), &own)
            && same_address(&wanted, &own))
            return give_handle(device, -1, function, out);
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    nvmlReturn_t result = enter();
    if (result == NVML_SUCCESS)
        result = device != NULL ? find_bus_id(bus_id, __func__, device)
                                : NVML_ERROR_INVALID_ARGUMENT;
    return leave(result);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

/* ---- plain values: one number of the scenario is the whole answer ---- */

static nvmlReturn_t plain_unsigned(const handle *h, const char *function, const char *path,
                                   unsigned *value)
{
    target t;
    nvmlReturn_t result = enter_device(h, function, &t);
    if (result == NVML_SUCCESS)
        result = read_unsigned(t.node, path, value);
    return leave_device(&t, result);
}

static nvmlReturn_t plain_u64(const handle *h, const char *function, const char *path,
                              unsigned long long *value)
{
    target t;
    nvmlReturn_t result = enter_device(h, function, &t);
    if (result == NVML_SUCCESS)
        result = read_u64(t.node, path, value);
    return leave_device(&t, result);
}

#define PLAIN_UNSIGNED(name, path) \
    nvmlReturn_t name(nvmlDevice_t device, unsigned *value) \
    { \
        return plain_unsigned(device, __func__, path, value); \
    }

#define PLAIN_U64(name, path) \
    nvmlReturn_t name(nvmlDevice_t device, unsigned long long *value) \
    { \
        return plain_u64(device, __func__, path, value); \
    }

PLAIN_UNSIGNED(nvmlDeviceGetPowerUsage, "power_mw")
PLAIN_UNSIGNED(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw")
PLAIN_UNSIGNED(nvmlDeviceGetPowerManagementLimit, "power_limit_mw")
PLAIN_U64(nvmlDeviceGetTotalEnergyConsumption, "energy_mj")
PLAIN_UNSIGNED(nvmlDeviceGetComputeMode, "compute_mode")
PLAIN_UNSIGNED(nvmlDeviceGetPerformanceState, "performance_state")
PLAIN_UNSIGNED(nvmlDeviceGetPersistenceMode, "persistence_mode")
PLAIN_UNSIGNED(nvmlDeviceGetDisplayActive, "display_active")
PLAIN_UNSIGNED(nvmlDeviceGetFanSpeed, "fan_percent")
PLAIN_UNSIGNED(nvmlDeviceGetCurrPcieLinkGeneration, "pcie.generation")
PLAIN_UNSIGNED(nvmlDeviceGetMaxPcieLinkGeneration, "pcie.max_generation")
PLAIN_UNSIGNED(nvmlDeviceGetCurrPcieLinkWidth, "pcie.width")
PLAIN_UNSIGNED(nvmlDeviceGetMaxPcieLinkWidth, "pcie.max_width")
PLAIN_U64(nvmlDeviceGetCurrentClocksThrottleReasons, "throttle_reasons")
PLAIN_U64(nvmlDeviceGetCurrentClocksEventReasons, "throttle_reasons")
PLAIN_UNSIGNED(nvmlDeviceGetNumaNodeId, "numa_node")

/* ---- identity ---- */

static nvmlReturn_t plain_text(const handle *h, const char *function, const char *path, char *out,
                               unsigned length)
{
    target t;
    nvmlReturn_t result = enter_device(h, function, &t);
    if (result == NVML_SUCCESS)
        result = copy_text(text_of(t.node, path), out, length);
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length)
{
    return plain_text(device, __func__, "uuid", uuid, length);
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned length)
{
    return plain_text(device, __func__, "serial", serial, length);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length)
{
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS) {
        char full[128];
        const char *text = text_of(t.gpu, "name");
        const char *profile = text_of(t.node, "profile");
        if (text != NULL && profile != NULL) {
            snprintf(full, sizeof full, "%s MIG %s", text, profile);
            text = full;
        }
        result = copy_text(text, name, length);
    }
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS && index == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *index = is_mig(&t) ? (unsigned)t.instance : t.index;
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *minor)
{
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS && minor == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && is_mig(&t))
        result = NVML_ERROR_NOT_SUPPORTED;
    if (result == NVML_SUCCESS)
        *minor = unsigned_or(t.gpu, "minor", t.index);
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS && (major == NULL || minor == NULL))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        const json *pair = json_member(t.gpu, "compute_capability");
        const json *first = json_item(pair, 0);
        const json *second = json_item(pair, 1);
        if (first != NULL && second != NULL) {
            *major = (int)first->integer;
            *minor = (int)second->integer;
        } else {
            result = NVML_ERROR_NOT_SUPPORTED;
        }
    }
    return leave_device(&t, result);
}

static void fill_pci(nvmlPciInfo_t *out, const pci_address *at, unsigned device_id)
{
    memset(out, 0, sizeof *out);
    out->domain = at->domain;
    out->bus = at->bus & 0xFF;
    out->device = at->device & 0x1F;
    out->pciDeviceId = device_id;
    snprintf(out->busId, sizeof out->busId, "%08X:%02X:%02X.0", out->domain, out->bus,
             out->device);
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:%02X.0", out->domain & 0xFFFF,
             out->bus, out->device);
}

static nvmlReturn_t pci_of(const json *node, nvmlPciInfo_t *out)
{
    pci_address at;

    if (!parse_address(text_of(node, "pci_bus_id"), &at))
        return NVML_ERROR_NOT_SUPPORTED;
    fill_pci(out, &at, unsigned_or(node, "pci_device_id", 0));
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS)
        result = pci != NULL ? pci_of(t.node, pci) : NVML_ERROR_INVALID_ARGUMENT;
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_v1_t *pci)
{
    target t;
    nvmlPciInfo_t plain;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS && pci == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && pci->version != STRUCT_VERSION(nvmlPciInfoExt_v1_t, 1))
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (result == NVML_SUCCESS)
        result = pci_of(t.node, &plain);
    if (result == NVML_SUCCESS) {
        pci->domain = plain.domain;
        pci->bus = plain.bus;
        pci->device = plain.device;
        pci->pciDeviceId = plain.pciDeviceId;
        pci->pciSubSystemId = 0;
        pci->baseClass = 0x03; /* display controller */
        pci->subClass = 0x02;  /* 3D controller */
        memcpy(pci->busId, plain.busId, sizeof pci->busId);
    }
    return leave_device(&t, result);
}

/* ---- memory ---- */

static nvmlReturn_t memory_of(const json *node, nvmlMemory_v2_t *out)
{
    nvmlReturn_t result = read_u64(node, "memory.total", &out->total);
    if (result == NVML_SUCCESS)
        result = read_u64(node, "memory.used", &out->used);
    if (result == NVML_SUCCESS) {
        out->reserved = u64_or(node, "memory.reserved", 0);
        unsigned long long taken = out->used + out->reserved;
        out->free = out->total > taken ? out->total - taken : 0;
    }
    return result;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    target t;
    nvmlMemory_v2_t full;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS)
        result = memory != NULL ? memory_of(t.node, &full) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        memory->total = full.total;
        memory->free = full.free;
        /* Version 1 has no field for reserved memory and counts it as used. */
        memory->used = full.used + full.reserved;
    }
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS && memory == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && memory->version != STRUCT_VERSION(nvmlMemory_v2_t, 2))
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (result == NVML_SUCCESS)
        result = memory_of(t.node, memory);
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS && pending == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        result = read_unsigned(t.node, "ecc.enabled", current);
    if (result == NVML_SUCCESS)
        *pending = unsigned_or(t.node, "ecc.pending", *current);
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned type, unsigned counter,
                                         unsigned long long *count)
{
    (void)counter; /* the same since the last reboot and over the lifetime */
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS && type > NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && !u64_or(t.node, "ecc.enabled", 0))
        result = NVML_ERROR_NOT_SUPPORTED;
    if (result == NVML_SUCCESS)
        result = read_u64(t.node,
                          type == NVML_MEMORY_ERROR_TYPE_CORRECTED ? "ecc.corrected"
                                                                   : "ecc.uncorrected",
                          count);
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *correctable,
                                       unsigned *uncorrectable, unsigned *pending,
                                       unsigned *failure)
{
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS)
        result = read_unsigned(t.node, "remapped_rows.correctable", correctable);
    if (result == NVML_SUCCESS)
        result = read_unsigned(t.node, "remapped_rows.uncorrectable", uncorrectable);
    if (result == NVML_SUCCESS)
        result = read_unsigned(t.node, "remapped_rows.pending", pending);
    if (result == NVML_SUCCESS)
        result = read_unsigned(t.node, "remapped_rows.failure", failure);
    return leave_device(&t, result);
}

/* ---- load, temperature, clocks ---- */

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS && utilization == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        result = read_unsigned(t.node, "utilization.gpu", &utilization->gpu);
    if (result == NVML_SUCCESS)
        result = read_unsigned(t.node, "utilization.memory", &utilization->memory);
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *celsius)
{
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS)
        result = sensor == NVML_TEMPERATURE_GPU ? read_unsigned(t.node, "temperature_c", celsius)
                                                : NVML_ERROR_INVALID_ARGUMENT;
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *temperature)
{
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS
        && (temperature == NULL || temperature->sensorType != NVML_TEMPERATURE_GPU))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && temperature->version != STRUCT_VERSION(nvmlTemperature_v1_t, 1))
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (result == NVML_SUCCESS)
        result = read_unsigned(t.node, "temperature_c", (unsigned *)&temperature->temperature);
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned threshold,
                                               unsigned *celsius)
{
    const char *path;

    switch (threshold) {
    case NVML_TEMPERATURE_THRESHOLD_SHUTDOWN:
        path = "shutdown_temperature_c";
        break;
    case NVML_TEMPERATURE_THRESHOLD_SLOWDOWN:
        path = "slowdown_temperature_c";
        break;
    case NVML_TEMPERATURE_THRESHOLD_GPU_MAX:
        path = "max_temperature_c";
        break;
    default:
        path = "";
    }
    return plain_unsigned(device, __func__, path, celsius);
}

static nvmlReturn_t clock_of(const handle *h, const char *function, unsigned type,
                             const char *const paths[NVML_CLOCK_COUNT], unsigned *mhz)
{
    target t;
    nvmlReturn_t result = enter_device(h, function, &t);
    if (result == NVML_SUCCESS)
        result = type < NVML_CLOCK_COUNT ? read_unsigned(t.node, paths[type], mhz)
                                         : NVML_ERROR_INVALID_ARGUMENT;
    return leave_device(&t, result);
}

/* In NVML's order: graphics, SM, memory, video.  Graphics and SM run from one clock. */

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    static const char *const paths[NVML_CLOCK_COUNT] = {
        "clocks.sm", "clocks.sm", "clocks.memory", "clocks.video"};
    return clock_of(device, __func__, type, paths, mhz);
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    static const char *const paths[NVML_CLOCK_COUNT] = {
        "clocks.max_sm", "clocks.max_sm", "clocks.max_memory", "clocks.max_video"};
    return clock_of(device, __func__, type, paths, mhz);
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, void *values)
{
    typedef struct {
        unsigned field, scope;
        long long timestamp, latency;
        unsigned kind, result;
        unsigned long long value;
    } field_value;
    field_value *first = values;
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS && (count != 1 || first->field != 230)) /* the recovery action */
        result = NVML_ERROR_NOT_SUPPORTED;
    if (result == NVML_SUCCESS) {
        unsigned action = 0;
        first->result = read_unsigned(t.node, "recovery_action", &action);
        first->value = action;
    }
    return leave_device(&t, result);
}

/* ---- MIG ---- */

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS && pending == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        result = read_unsigned(t.node, "mig.enabled", current);
    if (result == NVML_SUCCESS)
        *pending = unsigned_or(t.node, "mig.pending", *current);
    return leave_device(&t, result);
}

static unsigned max_instances(const json *gpu)
{
    const json *instances = json_path(gpu, "mig.instances");

    if (!u64_or(gpu, "mig.enabled", 0))
        return 0;
    return instances != NULL && instances->count > DEFAULT_MAX_MIG ? (unsigned)instances->count
                                                                   : DEFAULT_MAX_MIG;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count)
{
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS && count == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *count = max_instances(t.node);
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index,
                                                 nvmlDevice_t *mig)
{
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS && (mig == NULL || is_mig(&t)))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && !u64_or(t.gpu, "mig.enabled", 0))
        result = NVML_ERROR_NOT_SUPPORTED;
    if (result == NVML_SUCCESS) {
        if (instance_at(t.gpu, index) != NULL)
            *mig = handle_of(t.index, (int)index);
        else
            result = index < max_instances(t.gpu) ? NVML_ERROR_NOT_FOUND
                                                  : NVML_ERROR_INVALID_ARGUMENT;
    }
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    target t;
    nvmlReturn_t result = enter_device(mig, __func__, &t);
    if (result == NVML_SUCCESS && (device == NULL || !is_mig(&t)))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *device = handle_of(t.index, -1);
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *answer)
{
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS && answer == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *answer = is_mig(&t);
    return leave_device(&t, result);
}

static nvmlReturn_t instance_id(const handle *h, const char *function, const char *path,
                                unsigned *id)
{
    target t;
    nvmlReturn_t result = enter_device(h, function, &t);
    if (result == NVML_SUCCESS)
        result = is_mig(&t) ? read_unsigned(t.node, path, id) : NVML_ERROR_INVALID_ARGUMENT;
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id)
{
    return instance_id(device, __func__, "gi", id);
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id)
{
    return instance_id(device, __func__, "ci", id);
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS && attributes == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && !is_mig(&t))
        result = NVML_ERROR_NOT_SUPPORTED;
    if (result == NVML_SUCCESS) {
        memset(attributes, 0, sizeof *attributes);
        attributes->multiprocessorCount = unsigned_or(t.node, "multiprocessors", 0);
        attributes->gpuInstanceSliceCount = unsigned_or(t.node, "slices.gpu", 0);
        attributes->computeInstanceSliceCount = unsigned_or(t.node, "slices.compute", 0);
        attributes->sharedCopyEngineCount = attributes->gpuInstanceSliceCount;
        attributes->memorySizeMB = u64_or(t.node, "memory.total", 0) / MEBIBYTE;
    }
    return leave_device(&t, result);
}

/* ---- processes ---- */

/* Called for each process: `owner` is the GPU or the MIG instance that lists it. */
typedef void visit_process(const json *owner, const json *process, void *context);

/* A MIG parent answers for its instances too. */
static nvmlReturn_t each_process(const target *t, visit_process *visit, void *context)
{
    const json *own = json_member(t->node, "processes");
    const json *mig;
    bool listed = !json_is_null(own);

    for (const json *p = listed ? own->first : NULL; p != NULL; p = p->next)
        visit(t->node, p, context);
    for (size_t i = 0; (mig = instance_at(t->node, i)) != NULL; i++) {
        const json *theirs = json_member(mig, "processes");
        listed = true;
        for (const json *p = theirs ? theirs->first : NULL; p != NULL; p = p->next)
            visit(mig, p, context);
    }
    return listed ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

/* Fills the caller's array, in the layout of either version, and counts what it should hold. */
typedef struct {
    const char *type;
    nvmlProcessInfo_v1_t *v1;
    nvmlProcessInfo_v2_t *v2;
    unsigned capacity;
    unsigned found;
} process_list;

static void add_process(const json *owner, const json *process, void *context)
{
    process_list *list = context;
    const char *type = text_of(process, "type");
    unsigned at = list->found;

    if (strcmp(type ? type : "compute", list->type) != 0)
        return;
    list->found++;
    if (at >= list->capacity)
        return;

    unsigned pid = unsigned_or(process, "pid", 0);
    unsigned long long memory = u64_or(process, "memory", NVML_VALUE_NOT_AVAILABLE);
    if (list->v1 != NULL) {
        list->v1[at] = (nvmlProcessInfo_v1_t){pid, memory};
    } else if (list->v2 != NULL) {
        unsigned gi = unsigned_or(owner, "gi", NVML_NO_INSTANCE);
        unsigned ci = unsigned_or(owner, "ci", NVML_NO_INSTANCE);
        list->v2[at] = (nvmlProcessInfo_v2_t){pid, memory, unsigned_or(process, "gi", gi),
                                              unsigned_or(process, "ci", ci)};
    }
}

static nvmlReturn_t running_processes(const handle *h, const char *function, process_list list,
                                      unsigned *count)
{
    target t;
    nvmlReturn_t result = enter_device(h, function, &t);
    if (result == NVML_SUCCESS && count == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        list.capacity = list.v1 != NULL || list.v2 != NULL ? *count : 0;
        result = each_process(&t, add_process, &list);
    }
    if (result == NVML_SUCCESS) {
        *count = list.found;
        if (list.found > list.capacity)
            result = NVML_ERROR_INSUFFICIENT_SIZE;
    }
    return leave_device(&t, result);
}

#define PROCESS_LIST(name, kind, version) \
    nvmlReturn_t name(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_##version##_t *infos) \
    { \
        return running_processes(device, __func__, \
                                 (process_list){.type = kind, .version = infos}, count); \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, "compute", v1)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, "compute", v2)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, "graphics", v1)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics", v2)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, "compute", v2)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics", v2)

typedef struct {
    nvmlProcessUtilizationSample_t *samples;
    unsigned capacity;
    unsigned found;
    unsigned long long now;
} sample_list;

static void add_sample(const json *owner, const json *process, void *context)
{
    (void)owner;
    sample_list *list = context;
    unsigned percent = unsigned_or(process, "sm_percent", 0);

    if (percent == 0)
        return;
    if (list->found < list->capacity)
        list->samples[list->found] = (nvmlProcessUtilizationSample_t){
            .pid = unsigned_or(process, "pid", 0),
            .timeStamp = list->now,
            .smUtil = percent,
            .memUtil = unsigned_or(process, "memory_percent", 0),
        };
    list->found++;
}

static unsigned long long microseconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device,
                                             nvmlProcessUtilizationSample_t *samples,
                                             unsigned *count, unsigned long long last_seen)
{
    target t;
    sample_list list = {.samples = samples, .now = microseconds_now()};
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS && count == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    /* The driver does not measure processes of a GPU in MIG mode, nor of its instances. */
    if (result == NVML_SUCCESS && u64_or(t.gpu, "mig.enabled", 0))
        result = NVML_ERROR_NOT_SUPPORTED;
    if (result == NVML_SUCCESS) {
        list.capacity = samples != NULL ? *count : 0;
        result = each_process(&t, add_sample, &list);
    }
    if (result == NVML_SUCCESS && (list.found == 0 || list.now <= last_seen))
        result = NVML_ERROR_NOT_FOUND;
    if (result == NVML_SUCCESS) {
        *count = list.found;
        if (list.found > list.capacity)
            result = NVML_ERROR_INSUFFICIENT_SIZE;
    }
    return leave_device(&t, result);
}

/* ---- NVLink ---- */

typedef struct {
    const json *entry; /* the "nvlinks" entry this physical link belongs to */
    unsigned lane;     /* its number within the entry */
    bool active;
    bool to_switch;
} nvlink;

static bool goes_to_switch(const json *entry)
{
    const char *to = text_of(entry, "to");
    return to != NULL && strcmp(to, "switch") == 0;
}

static bool is_active(const json *entry)
{
    return u64_or(entry, "active", 1);
}

static nvmlReturn_t find_nvlink(const json *node, unsigned link, nvlink *out)
{
    const json *links = json_member(node, "nvlinks");

    if (json_is_null(links))
        return NVML_ERROR_NOT_SUPPORTED;
    for (const json *entry = links->first; entry != NULL; entry = entry->next) {
        unsigned lanes = unsigned_or(entry, "lanes", 1);
        if (link < lanes) {
            *out = (nvlink){entry, link, is_active(entry), goes_to_switch(entry)};
            return NVML_SUCCESS;
        }
        link -= lanes;
    }
    return NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *active)
{
    target t;
    nvlink found;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS)
        result = active != NULL ? find_nvlink(t.node, link, &found) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *active = found.active;
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned link, unsigned *version)
{
    target t;
    nvlink found;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS)
        result = find_nvlink(t.node, link, &found);
    if (result == NVML_SUCCESS)
        result = read_unsigned(t.node, "nvlink_version", version);
    return leave_device(&t, result);
}

/* Each island of GPUs has switches of its own, in a PCI domain of its own; the lanes are dealt
 * out over them, as the boards do. */
static pci_address switch_address(const nvlink *link)
{
    unsigned switches = unsigned_or(link->entry, "switches", DEFAULT_SWITCHES);
    return (pci_address){
        .domain = unsigned_or(link->entry, "island", 0),
        .bus = FIRST_SWITCH_BUS + (switches > 0 ? link->lane % switches : 0),
    };
}

static nvmlReturn_t remote_pci(const nvlink *link, nvmlPciInfo_t *out)
{
    if (!link->active)
        return NVML_ERROR_NOT_SUPPORTED;
    if (link->to_switch) {
        pci_address at = switch_address(link);
        fill_pci(out, &at, 0);
        return NVML_SUCCESS;
    }
    unsigned to = unsigned_or(link->entry, "to", MAX_DEVICES);
    return to < scenario.count ? pci_of(scenario.devices[to], out) : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link,
                                                 nvmlPciInfo_t *pci)
{
    target t;
    nvlink found;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS)
        result = pci != NULL ? find_nvlink(t.node, link, &found) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        result = remote_pci(&found, pci);
    return leave_device(&t, result);
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link,
                                                 unsigned *type)
{
    target t;
    nvlink found;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS)
        result = type != NULL ? find_nvlink(t.node, link, &found) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && !found.active)
        result = NVML_ERROR_NOT_SUPPORTED;
    if (result == NVML_SUCCESS)
        *type = found.to_switch ? NVML_NVLINK_DEVICE_TYPE_SWITCH : NVML_NVLINK_DEVICE_TYPE_GPU;
    return leave_device(&t, result);
}

/* ---- topology ---- */

/* Enters for two devices at once; only the first one's calls are counted. */
static nvmlReturn_t enter_pair(const handle *a, const handle *b, const char *function, target *ta,
                               target *tb)
{
    nvmlReturn_t result = enter_device(a, function, ta);
    if (result == NVML_SUCCESS)
        result = find_target(b, function, tb);
    if (result == NVML_SUCCESS && (is_mig(ta) || is_mig(tb)))
        result = NVML_ERROR_NOT_SUPPORTED;
    return result;
}

static unsigned topology_level(const target *a, const target *b)
{
    const json *row = json_item(json_member(scenario.root, "topology"), a->index);
    const json *level = json_item(row, b->index);

    if (a->index == b->index)
        return NVML_TOPOLOGY_INTERNAL;
    if (level != NULL)
        return (unsigned)level->integer;
    return u64_or(a->gpu, "numa_node", ~0ULL) == u64_or(b->gpu, "numa_node", ~0ULL)
               ? NVML_TOPOLOGY_NODE
               : NVML_TOPOLOGY_SYSTEM;
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, unsigned *level)
{
    target ta, tb;
    nvmlReturn_t result = enter_pair(a, b, __func__, &ta, &tb);
    if (result == NVML_SUCCESS && level == NULL)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *level = topology_level(&ta, &tb);
    return leave_device(&ta, result);
}

/* Whether an active link of either kind joins the two: directly, or through switches of one
 * island. */
static bool are_linked(const target *a, const target *b)
{
    const json *ours = json_member(a->gpu, "nvlinks");
    const json *theirs = json_member(b->gpu, "nvlinks");

    for (const json *x = ours ? ours->first : NULL; x != NULL; x = x->next) {
        if (!is_active(x))
            continue;
        if (!goes_to_switch(x)) {
            if (u64_or(x, "to", MAX_DEVICES) == b->index)
                return true;
            continue;
        }
        for (const json *y = theirs ? theirs->first : NULL; y != NULL; y = y->next)
            if (is_active(y) && goes_to_switch(y)
                && u64_or(x, "island", 0) == u64_or(y, "island", 0))
                return true;
    }
    return false;
}

static unsigned p2p_status(const target *a, const target *b, unsigned capability)
{
    if (a->index == b->index || are_linked(a, b))
        return NVML_P2P_STATUS_OK;
    if (capability == NVML_P2P_CAPS_INDEX_NVLINK)
        return NVML_P2P_STATUS_NOT_SUPPORTED;
    return u64_or(a->gpu, "pcie_p2p", 1) && u64_or(b->gpu, "pcie_p2p", 1)
               ? NVML_P2P_STATUS_OK
               : NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, unsigned capability,
                                    unsigned *status)
{
    target ta, tb;
    nvmlReturn_t result = enter_pair(a, b, __func__, &ta, &tb);
    if (result == NVML_SUCCESS && (status == NULL || capability > NVML_P2P_CAPS_INDEX_PCI))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *status = p2p_status(&ta, &tb, capability);
    return leave_device(&ta, result);
}

/* The NUMA node as one bit of a mask, in both driver generations. */
nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned size, unsigned long *mask,
                                         unsigned scope)
{
    (void)scope;
    const unsigned bits = 8 * sizeof *mask;
    unsigned node;
    target t;
    nvmlReturn_t result = enter_device(device, __func__, &t);
    if (result == NVML_SUCCESS && (mask == NULL || size == 0))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        result = read_unsigned(t.node, "numa_node", &node);
    if (result == NVML_SUCCESS && node >= size * bits)
        result = NVML_ERROR_INSUFFICIENT_SIZE;
    if (result == NVML_SUCCESS) {
        memset(mask, 0, size * sizeof *mask);
        mask[node / bits] |= 1UL << node % bits;
    }
    return leave_device(&t, result);
}
