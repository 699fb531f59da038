/* A driver without a GPU: the calls of NVML that a worker makes, answered from the file that NVML_STATE names.

   Each line of it is "GPU KEY NUMBER". A number that is not there is not supported. While "GPU lost 1" is there, all
   calls for the GPU fail; while "GPU hang 1" is there, they do not return. Each line "GPU xid NUMBER" is an event. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10, LOST = 15, GPUS = 4 };

typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct { int number; int is_part; } *Device;
typedef struct { Device device; u64 type; u64 data; u32 gpu_instance; u32 compute_instance; } Event;

static struct { int number; int is_part; } gpus[GPUS] = {{0}, {1}, {2}, {3}},
                                           parts[GPUS] = {{0, 1}, {1, 1}, {2, 1}, {3, 1}};
static int registered[GPUS], taken;

/* The line of a key after `skipped` others; its GPU is any if `gpu` is -1, and then set. */
static int find(int *gpu, const char *key, int skipped, u64 *number) {
    FILE *file = fopen(getenv("NVML_STATE"), "r");
    char name[64];
    int line_gpu, found = 0;
    u64 value;
    while (file && !found && fscanf(file, "%d %63s %llu", &line_gpu, name, &value) == 3)
        if ((*gpu == -1 || line_gpu == *gpu) && !strcmp(name, key) && skipped-- == 0) {
            found = 1;
            *gpu = line_gpu;
            *number = value;
        }
    if (file) fclose(file);
    return found;
}

static int answer(Device device, const char *key, u64 *number) {
    int gpu = device->number;
    while (find(&gpu, "hang", 0, number)) usleep(1000);
    if (find(&gpu, "lost", 0, number)) return LOST;
    return find(&gpu, key, 0, number) ? SUCCESS : NOT_SUPPORTED;
}

static int answer_u32(Device device, const char *key, u32 *number) {
    u64 wide = 0;
    int status = answer(device, key, &wide);
    if (!status) *number = (u32)wide;
    return status;
}

int nvmlInitWithFlags(u32 flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int status) { return status == LOST ? "GPU is lost" : status == NOT_FOUND ? "Not Found" : "?"; }

static int by_number(const char *name, const char *format, Device *device) {
    int number, read = 0;
    if (sscanf(name, format, &number, &read) != 1 || name[read] || number < 0 || number >= GPUS) return NOT_FOUND;
    u64 unused;
    int gpu = number;
    if (!find(&gpu, "energy", 0, &unused)) return NOT_FOUND;
    *device = (Device)(name[0] == 'M' ? &parts[number] : &gpus[number]);
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(u32 *count) {
    u64 unused;
    for (*count = 0; *count < GPUS; ++*count) {
        int gpu = (int)*count;
        if (!find(&gpu, "energy", 0, &unused)) break;
    }
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(u32 index, Device *device) {
    u32 count;
    nvmlDeviceGetCount_v2(&count);
    if (index >= count) return NOT_FOUND;
    *device = (Device)&gpus[index];
    return SUCCESS;
}
int nvmlDeviceGetName(Device device, char *name, u32 length) { return snprintf(name, length, "GPU"), SUCCESS; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Device *device) { return by_number(bus, "0000:%x:00.0%n", device); }
int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
    return by_number(uuid, uuid[0] == 'M' ? "MIG-%d%n" : "GPU-%d%n", device);
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device part, Device *device) {
    if (!part->is_part) return NOT_FOUND;
    *device = (Device)&gpus[part->number];
    return SUCCESS;
}
int nvmlDeviceGetIndex(Device device, u32 *index) { return *index = (u32)device->number, SUCCESS; }
int nvmlDeviceGetUUID(Device device, char *uuid, u32 length) {
    return snprintf(uuid, length, device->is_part ? "MIG-%d" : "GPU-%d", device->number), SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device device, u32 shares[2]) { return answer_u32(device, "utilization", &shares[0]); }
int nvmlDeviceGetMemoryInfo(Device device, u64 total_free_used[3]) {
    int status = answer(device, "memory_size", &total_free_used[0]);
    return status ? status : answer(device, "memory_used", &total_free_used[2]);
}
int nvmlDeviceGetPowerUsage(Device device, u32 *milliwatts) { return answer_u32(device, "power", milliwatts); }
int nvmlDeviceGetEnforcedPowerLimit(Device device, u32 *milliwatts) { return answer_u32(device, "power_limit", milliwatts); }
int nvmlDeviceGetTotalEnergyConsumption(Device device, u64 *millijoules) { return answer(device, "energy", millijoules); }
int nvmlDeviceGetTemperature(Device device, int sensor, u32 *degrees) { return answer_u32(device, "temperature", degrees); }
int nvmlDeviceGetTemperatureThreshold(Device device, int threshold, u32 *degrees) {
    return threshold == 1 ? answer_u32(device, "slowdown", degrees) : NOT_SUPPORTED;
}
int nvmlDeviceGetMarginTemperature(Device device, struct { u32 version; int degrees; } *margin) {
    return answer_u32(device, "margin", (u32 *)&margin->degrees);
}
int nvmlDeviceGetCurrentClocksEventReasons(Device device, u64 *bits) { return answer(device, "throttled", bits); }
int nvmlDeviceGetTotalEccErrors(Device device, int kind, int counter, u64 *count) {
    return counter == 0 ? answer(device, kind ? "uncorrected" : "corrected", count) : NOT_SUPPORTED;
}

int nvmlEventSetCreate(void **set) { return *set = registered, SUCCESS; }
int nvmlDeviceRegisterEvents(Device device, u64 types, void *set) {
    if (types != 8 || set != registered) return NOT_SUPPORTED;
    return registered[device->number] = 1, SUCCESS;
}
int nvmlEventSetWait_v2(void *set, Event *event, u32 limit_ms) {
    int gpu = -1;
    u64 xid;
    if (!find(&gpu, "xid", taken, &xid)) return TIMEOUT;
    taken++;
    if (!registered[gpu]) return TIMEOUT;
    *event = (Event){(Device)&gpus[gpu], 8, xid, 0, 0};
    return SUCCESS;
}
