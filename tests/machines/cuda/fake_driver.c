/* A CUDA driver and an NCCL that record their calls as lines of text. Built and loaded by test_native.py. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuda.h"

static char log_text[1 << 20];
static size_t used;
static int failing = -1, calls;
static _Thread_local CUcontext contexts[4] = {(CUcontext)1}; /* of the thread; the last one is current */
static _Thread_local int context;

#define SAY(...) used += (size_t)snprintf(log_text + used, sizeof log_text - used, __VA_ARGS__)

static volatile int blocked, waits;

static CUresult next(void) {
  for (int i = 0; blocked; i++, waits = 1) { /* as for room in a queue */
    struct timespec moment = {0, 1000000};
    nanosleep(&moment, NULL);
    if (i > 10000)
      return CUDA_ERROR_LAUNCH_TIMEOUT;
  }
  if (contexts[context] != (CUcontext)1)
    return CUDA_ERROR_INVALID_CONTEXT;
  return calls++ == failing ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}

const char *fake_take(void) {
  static char taken[1 << 20];
  memcpy(taken, log_text, used + 1);
  used = 0;
  log_text[0] = 0;
  calls = 0;
  return taken;
}

void fake_fail(int call) { failing = call; }

/* Let calls wait until this is called with 0. */
void fake_block(int on) { blocked = on, waits = 0; }

int fake_waits(void) { return waits; }

CUresult cuCtxGetCurrent(CUcontext *current) {
  *current = contexts[context];
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext current) {
  contexts[context] = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext current) {
  contexts[++context] = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *current) {
  *current = contexts[context--];
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char **text) {
  *text = code == CUDA_ERROR_ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "unknown";
  return CUDA_SUCCESS;
}

/* The parameters of a fake kernel: a text of one letter a parameter, in the place of a handle. */
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  if (extra != NULL)
    return CUDA_ERROR_INVALID_VALUE;
  SAY("%p: launch %ux%u shared %u attributes", (void *)config->hStream, config->gridDimX, config->blockDimX,
      config->sharedMemBytes);
  for (unsigned i = 0; i < config->numAttrs; i++)
    SAY(" %d", (int)config->attrs[i].id);
  SAY(" (");
  int number = 0;
  for (const char *letter = (const char *)function; *letter; letter++, number++) {
    void *at = parameters[number];
    switch (*letter) {
    case 'p': SAY(" %llx", *(unsigned long long *)at); break;
    case 'i': SAY(" %d", *(int *)at); break;
    case 'l': SAY(" %lld", *(long long *)at); break;
    case 'b': SAY(" %d", *(signed char *)at); break;
    case 'f': SAY(" %g", (double)*(float *)at); break;
    case 'm':
      if ((unsigned long long)at % 64)
        return CUDA_ERROR_MISALIGNED_ADDRESS;
      SAY(" map %llx/%llx", ((unsigned long long *)at)[0], ((unsigned long long *)at)[15]);
      break;
    }
  }
  if (parameters[number] != NULL)
    return CUDA_ERROR_INVALID_VALUE;
  SAY(" )\n");
  return next();
}

CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned count, CUstreamBatchMemOpParams *ops, unsigned flags) {
  SAY("%p: memory %u", (void *)stream, flags);
  for (unsigned i = 0; i < count; i++)
    SAY(" %d %llx %llu", (int)ops[i].operation, (unsigned long long)ops[i].waitValue.address,
        (unsigned long long)ops[i].waitValue.value64);
  SAY("\n");
  return next();
}

CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
  SAY("%p: copy %llx -> %llx %zu\n", (void *)stream, source, target, size);
  return next();
}

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *rows, CUstream stream) {
  SAY("%p: rows %llx/%zu -> %llx/%zu %zux%zu\n", (void *)stream, rows->srcDevice, rows->srcPitch, rows->dstDevice,
      rows->dstPitch, rows->Height, rows->WidthInBytes);
  return next();
}

static CUresult set(CUstream stream, CUdeviceptr target, unsigned value, int bits, size_t count) {
  SAY("%p: set %llx to %x %zux%d\n", (void *)stream, target, value, count, bits);
  return next();
}

CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t count, CUstream stream) {
  return set(stream, target, value, 8, count);
}

CUresult cuMemsetD16Async(CUdeviceptr target, unsigned short value, size_t count, CUstream stream) {
  return set(stream, target, value, 16, count);
}

CUresult cuMemsetD32Async(CUdeviceptr target, unsigned value, size_t count, CUstream stream) {
  return set(stream, target, value, 32, count);
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  SAY("%p: record %p\n", (void *)stream, (void *)event);
  return next();
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  SAY("%p: wait %p %u\n", (void *)stream, (void *)event, flags);
  return next();
}

CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *address) {
  map->opaque[0] = (cuuint64_t)address;
  map->opaque[15]++; /* how often */
  return CUDA_SUCCESS;
}

/* Some numbers are addresses on the GPU. */
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  if (attribute != CU_POINTER_ATTRIBUTE_MEMORY_TYPE || address >> 32 != 0xabcd)
    return CUDA_ERROR_INVALID_VALUE;
  *(unsigned *)value = CU_MEMORYTYPE_DEVICE;
  return CUDA_SUCCESS;
}

/* Graphs. The tests make them: a graph is its only node, unless it has a list of nodes. A capture takes the next one. */
typedef struct {
  size_t nodes;
  CUgraphNode *list;
  CUgraphNode before[2]; /* on which this node depends */
  int programmatic;
  int type;
  CUfunction function;
  CUkernel kernel;
  unsigned sizes[7]; /* grid, block, shared memory */
  void **parameters, **extra;
  CUlaunchAttribute attributes[2];
  CUDA_MEMSET_NODE_PARAMS set;
} Graph;

static CUgraph graph_of_capture;
static int graphs; /* that exist */

void fake_graph(CUgraph graph) { graph_of_capture = graph; }

int fake_graphs(void) { return graphs; }

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  SAY("%p: begin capture %d\n", (void *)stream, (int)mode);
  return next();
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
  SAY("%p: end capture\n", (void *)stream);
  CUresult code = next();
  *graph = code == CUDA_SUCCESS ? graph_of_capture : NULL;
  graphs += *graph != NULL;
  return code;
}

CUresult cuGraphDestroy(CUgraph graph) {
  graphs -= graph != NULL;
  return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
  Graph *of = (Graph *)graph;
  if (nodes != NULL && of->list == NULL)
    *nodes = (CUgraphNode)graph;
  else if (nodes != NULL)
    memcpy(nodes, of->list, *count * sizeof *nodes);
  *count = of->nodes;
  return next();
}

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *before, CUgraphEdgeData *edges, size_t *count) {
  Graph *of = (Graph *)node;
  size_t many = (of->before[0] != NULL) + (of->before[1] != NULL);
  *count = *count < many ? *count : many;
  memcpy(before, of->before, *count * sizeof *before);
  memset(edges, 0, *count * sizeof *edges);
  if (*count)
    edges->type = (unsigned char)of->programmatic;
  return next();
}

CUresult cuGraphMemsetNodeGetParams(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS *parameters) {
  *parameters = ((Graph *)node)->set;
  return next();
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type) {
  int of_graph = ((Graph *)node)->type;
  *type = (CUgraphNodeType)(of_graph < 0 ? 0 : of_graph); /* -1: a kernel with unknown attributes */
  return next();
}

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *parameters) {
  Graph *graph = (Graph *)node;
  parameters->func = graph->function;
  parameters->kern = graph->kernel;
  memcpy(&parameters->gridDimX, graph->sizes, sizeof graph->sizes);
  parameters->kernelParams = graph->parameters;
  parameters->extra = graph->extra;
  return next();
}

CUresult cuGraphKernelNodeGetAttribute(CUgraphNode node, CUlaunchAttributeID id, CUlaunchAttributeValue *value) {
  for (int i = 0; i < 2; i++)
    if (((Graph *)node)->attributes[i].id == id)
      *value = ((Graph *)node)->attributes[i].value;
  if (((Graph *)node)->type < 0)
    return CUDA_ERROR_INVALID_VALUE;
  return id == CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
  *function = (CUfunction)kernel;
  return next();
}

CUresult cuFuncGetName(const char **name, CUfunction function) {
  (void)function;
  *name = "gemm";
  return next();
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t number, size_t *offset, size_t *size) {
  size_t end = 0, i = 0;
  for (const char *letter = (const char *)function; *letter; letter++, i++) {
    size_t length = *letter == 'm' ? 128 : *letter == 'p' || *letter == 'l' ? 8 : *letter == 'b' ? 1 : 4;
    size_t unit = *letter == 'm' ? 64 : length;
    *offset = (end + unit - 1) / unit * unit;
    *size = length;
    end = *offset + length;
    if (i == number)
      return *letter == '?' ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

/* NCCL. A call is in progress until it was asked about `pending` times; then it ends with the code `nccl_failing`. */
static int pending, nccl_failing;

void fake_nccl(int in_progress, int error) { pending = in_progress, nccl_failing = error; }

static int nccl_code(void) { return pending > 0 ? 7 : nccl_failing; }

int ncclAllGather(const void *x, void *y, size_t count, int type, void *communicator, CUstream stream) {
  SAY("%p: allgather %llx -> %llx %zu of %d by %p\n", (void *)stream, (unsigned long long)x, (unsigned long long)y, count, type, communicator);
  return nccl_code();
}

int ncclReduceScatter(const void *x, void *y, size_t count, int type, int op, void *communicator, CUstream stream) {
  SAY("%p: reduce_scatter %d %llx -> %llx %zu of %d by %p\n", (void *)stream, op, (unsigned long long)x, (unsigned long long)y, count, type, communicator);
  return nccl_code();
}

int ncclAllReduce(const void *x, void *y, size_t count, int type, int op, void *communicator, CUstream stream) {
  SAY("%p: allreduce %d %llx -> %llx %zu of %d by %p\n", (void *)stream, op, (unsigned long long)x, (unsigned long long)y, count, type, communicator);
  return nccl_code();
}

int ncclCommGetAsyncError(void *communicator, int *code) {
  (void)communicator;
  pending--;
  *code = nccl_code();
  return 0;
}

const char *ncclGetErrorString(int code) { return code == 6 ? "remote process exited" : "unknown"; }

static int mode = 0;

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *other) {
  int before = mode;
  mode = (int)*other;
  *other = (CUstreamCaptureMode)before;
  return CUDA_SUCCESS;
}

int fake_mode(void) { return mode; }
