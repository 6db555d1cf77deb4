/* A plain list of a program's kernels from CUPTI, independent of ours: what `check_profile.py --listing` compares with.
 *
 *     gcc -shared -fPIC dev/reference/kernel_list.c -o kernel_list.so -lcupti
 *     KERNEL_LIST=kernels.csv CUDA_INJECTION64_PATH=$PWD/kernel_list.so ./train_gpt2cu ...
 *
 * Writes one line a kernel, "nanoseconds,mangled name", in the order in which CUPTI hands them over. */
#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>

static FILE* list;

static void CUPTIAPI want_buffer(uint8_t** buffer, size_t* bytes, size_t* most_records) {
    *bytes = (size_t)8 << 20;
    *buffer = (uint8_t*)malloc(*bytes);
    *most_records = 0;
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t* buffer, size_t bytes, size_t valid) {
    CUpti_Activity* record = NULL;
    (void)context, (void)stream, (void)bytes;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        const CUpti_ActivityKernel9* kernel = (const CUpti_ActivityKernel9*)record;  // later ones only append fields
        if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) continue;
        fprintf(list, "%llu,%s\n", (unsigned long long)(kernel->end - kernel->start), kernel->name);
    }
    free(buffer);
}

static void at_end(void) {
    cuptiActivityFlushAll(1);
    fclose(list);
}

// What CUDA calls in a library that CUDA_INJECTION64_PATH names.
int InitializeInjection(void) {
    const char* path = getenv("KERNEL_LIST");
    list = fopen(path ? path : "kernels.csv", "w");
    if (!list) return 0;
    cuptiActivityRegisterCallbacks(want_buffer, take_buffer);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    atexit(at_end);
    return 1;
}
